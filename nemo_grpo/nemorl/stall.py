"""Stacks of a driver that makes no progress, written to its log."""

import faulthandler
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl.callbacks import Callback

log = logging.getLogger(__name__)

STALL_S = 600.0
"""Seconds: NeMo-RL's default of async_rl.stall_watchdog.stall_timeout_s, a key of the single controller."""


def dump_after(seconds: float, *, ends: bool) -> None:
    """Write the stacks of all threads after this time, unless another call postpones it.

    Args:
        seconds: time from now.
        ends: also end the process.
    """
    faulthandler.dump_traceback_later(seconds, exit=ends, file=sys.__stderr__ or 2)


class StallDump(Callback):
    """Writes the stacks of NeMo-RL's other trainers if they log nothing and save nothing for too long.

    Their loops wait for workers without a limit and say nothing. A long step is no stall, so the run goes on.
    """

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Postpone the dump, because the trainer logs something."""
        dump_after(STALL_S, ends=False)
        return {}

    def on_checkpoint(self, folder: Any) -> None:
        """Postpone the dump, because the trainer saves a checkpoint."""
        dump_after(STALL_S, ends=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Write the stacks whenever the trainer stalls within the block."""
        log.info("the driver's stacks are written after every %g s without a metric", STALL_S)
        dump_after(STALL_S, ends=False)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
