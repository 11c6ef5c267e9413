"""Graceful shutdown: the first signal stops the loop after its step, a second one ends the process."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
"""Exit code (EX_TEMPFAIL) of a run that a signal stopped and that --resume can continue."""

# Ctrl-C sends SIGINT, the end of a job SIGTERM, and Slurm's --signal sends SIGUSR1 some time before that end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The signal that asked the run to stop. The object is true once a signal has come."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


def code_when_stopped(step: int, *, has_checkpoints: bool, remedy: str) -> int:
    """Log that a signal stopped a run, and return the run's exit code, which is the same on both engines.

    Args:
        step: Last step of the run.
        has_checkpoints: True if the recipe saves checkpoints.
        remedy: Advice on how to continue the run.
    """
    # Without a checkpoint a restart could not continue, so the exit code must not ask for a restart.
    if not has_checkpoints:
        log.error("stopped at step %d without a checkpoint: checkpointing.enabled=false", step)
        return 1
    log.warning("stopped at step %d; %s", step, remedy)
    return EXIT_INTERRUPTED


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block, let the first of `SIGNALS` only set the request.

    The second signal has the effect that it has outside of the block, usually the end of the process.
    """
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
        # A step may take minutes, and a second signal must end the process without waiting for it.
        restore()

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield request
    finally:
        restore()
