"""Processes of a run on this machine: one per rank, started and ended together."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nemo_grpo.run.signals import EXIT_INTERRUPTED, SIGNALS
from nemo_grpo.support.errors import how_ended

log = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run ``nemo-grpo <arguments>`` on ``num_ranks`` ranks, each a process with one thread.

    Signals that ask a run to stop are passed on to every rank. When a rank fails, the others are ended within
    `GRACE_SECONDS`; its own traceback is on stderr.

    Returns:
        0 if all ranks returned 0, else the exit code of the first rank that did not; 128 + N if signal N
        ended it, as in a shell.
    """
    with reserved_port() as port:
        return _launch(arguments, num_ranks, port)


def _launch(arguments: Sequence[str], num_ranks: int, port: int) -> int:
    """Start the ranks, pass signals on, and wait."""
    command = [sys.executable, "-m", "nemo_grpo.cli", *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | _environment(rank, num_ranks, port),
            # A process group of its own, so that Ctrl-C reaches the rank once, through us.
            start_new_session=True,
        )
        for rank in range(num_ranks)
    ]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    handlers_before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        return _wait(ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                # Reaped, or it would stay as a zombie while this process lives.
                rank.wait()
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the variables by which torch.distributed knows a rank, as torchrun sets them."""
    return {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; after the first failure only for `GRACE_SECONDS`."""
    failed_at: float | None = None
    exit_code = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        failures = [code for code in codes if code]
        if failures and failed_at is None:
            failed_at = time.monotonic()
            exit_code = failures[0]
            # An interrupted rank is no failure: all ranks stop after the same step.
            if exit_code != EXIT_INTERRUPTED:
                failed_rank = codes.index(exit_code)
                log.error("rank %d ended (%s); ending the others", failed_rank, how_ended(exit_code))
        have_all_ended = None not in codes
        is_overdue = failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS
        if have_all_ended or is_overdue:
            # A negative code is a signal's number, which a shell reports as 128 + N.
            return exit_code if exit_code >= 0 else 128 - exit_code
        time.sleep(0.1)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port within the block.

    The socket that holds it does not listen and has SO_REUSEADDR, so a server that sets it, too, can listen
    there; torch's TCPStore does. A port that is only looked up may go to an outgoing connection before the
    server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
