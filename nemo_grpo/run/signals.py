"""Graceful shutdown: the first signal stops the loop after its step, a second one ends the process."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code of a run that was asked to stop and saved a checkpoint: run again with --resume (EX_TEMPFAIL)."""

# Ctrl-C, the end of a job, and what Slurm's --signal sends before a job's time is over.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The signal that has asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


def code_when_stopped(step: int, *, has_checkpoints: bool, remedy: str) -> int:
    """Log that a run was stopped after a step, and return its exit code, the same on both engines.

    Args:
        step: last step of the run.
        has_checkpoints: the recipe saves some.
        remedy: how to continue the run.
    """
    # Without a checkpoint no restart can go on, so the code must not ask for one.
    if not has_checkpoints:
        log.error("stopped at step %d without a checkpoint: checkpointing.enabled=false", step)
        return 1
    log.warning("stopped at step %d; %s", step, remedy)
    return EXIT_INTERRUPTED


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Let SIGINT, SIGTERM and SIGUSR1 set the request within the block; a second signal acts as outside."""
    request = StopRequest()
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        log.warning(
            "%s: stopping after this step, with a checkpoint; send it again to stop now", request.signal.name
        )
        # A step may take minutes, and a second signal must not wait for its end.
        restore()

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield request
    finally:
        restore()
