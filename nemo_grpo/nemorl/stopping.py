"""Why a run on the cluster ended; NeMo-RL's trainers return without a reason.

A signal acts like NeMo-RL's own time limit, at which it saves and returns. Its asynchronous trainer also
returns after errors, which it only prints, so a return alone does not mean success.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_grpo.engine.signals import StopRequest, stop_on_signals
from nemo_grpo.nemorl import compat

log = logging.getLogger(__name__)

THRESHOLD_MODULES = (compat.GRPO, "nemo_rl.algorithms.grpo_sync")
THRESHOLD_FUNCTION = "_validation_early_stop_message"
"""In HEAD; its trainers end the run if it returns a message."""
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
    checker = compat.import_name("nemo_rl.utils.timer:TimeoutChecker")
    ask = checker.check_save
    with ExitStack() as stack:
        stop = Stop(stack.enter_context(stop_on_signals()))

        def check_save(self: Any) -> bool:
            due = bool(ask(self)) or (bool(stop.request) and not stop.happened)
            stop.happened |= due
            return due

        stack.enter_context(compat.replaced(checker, "check_save", check_save))
        _watch_threshold(stop, stack)
        if logger is not None:
            _watch_steps(logger, stop, stack)
        yield stop


def _watch_threshold(stop: Stop, stack: ExitStack) -> None:
    for module in THRESHOLD_MODULES:
        if compat.has_name(f"{module}:{THRESHOLD_FUNCTION}"):
            ask = compat.import_name(f"{module}:{THRESHOLD_FUNCTION}")

            def message(*args: Any, ask: Any = ask, **kwargs: Any) -> Any:
                text = ask(*args, **kwargs)
                stop.reached_threshold |= text is not None
                return text

            owner = importlib.import_module(module)
            stack.enter_context(compat.replaced(owner, THRESHOLD_FUNCTION, message))


def _watch_steps(logger: Any, stop: Stop, stack: ExitStack) -> None:
    log_metrics = logger.log_metrics

    def watched(metrics: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        done = log_metrics(metrics, step, *args, **kwargs)
        if kwargs.get("prefix") == LAST_PREFIX:
            stop.last_step = step
        return done

    stack.enter_context(compat.replaced(logger, "log_metrics", watched))
