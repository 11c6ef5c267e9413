"""Why a run on the cluster ended; NeMo-RL's trainers return without a reason.

A signal acts like NeMo-RL's own time limit, at which it saves and returns. Its asynchronous trainer also
returns after errors, which it only prints, so a return alone does not mean success.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_grpo.nemorl import hooks
from nemo_grpo.nemorl.observers import listening
from nemo_grpo.training.signals import StopRequest, stop_on_signals

log = logging.getLogger(__name__)

LAST_PREFIX = "timing/train"


@dataclass
class Stop:
    """What is known once the trainer has returned.

    Attributes: request: a signal.  happened: the trainer was told to save and return, by a signal or by
        checkpoint_must_save_by.  reached_threshold: validation reached stop_at_validation_threshold.
        last_step: the newest step that was trained, saved and logged.
    """

    request: StopRequest
    happened: bool = False
    reached_threshold: bool = False
    last_step: int = 0


@contextmanager
def stop_after_step(logger: Any = None) -> Iterator[Stop]:
    """Within the block SIGUSR1, SIGTERM and SIGINT end the training after its step, with a checkpoint.

    Both trainers ask `TimeoutChecker.check_save` once per step, save if it says so, and return.

    Args: logger: NeMo-RL's; every trainer's last call of a step is for `LAST_PREFIX`.
    """
    with ExitStack() as stack:
        stop = Stop(stack.enter_context(stop_on_signals()))

        def asked(theirs: Callable[..., Any]) -> Callable[..., bool]:
            def check_save(*arguments: Any, **named: Any) -> bool:
                due = bool(theirs(*arguments, **named)) or (bool(stop.request) and not stop.happened)
                stop.happened |= due
                return due

            return check_save

        def noticed(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def message(*arguments: Any, **named: Any) -> Any:
                text = theirs(*arguments, **named)
                stop.reached_threshold |= text is not None
                return text

            return message

        def count(_metrics: Any, step: int, prefix: str) -> None:
            if prefix == LAST_PREFIX:
                stop.last_step = step

        stack.enter_context(hooks.placed("stop", asked))
        stack.enter_context(hooks.placed("threshold", noticed))
        if logger is not None:
            stack.enter_context(listening(logger, told=count))
        yield stop
