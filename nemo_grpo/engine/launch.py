"""Launcher of a run with several ranks on this machine: one process per rank, started and ended together."""

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
"""Seconds until the other ranks are killed after one rank has failed."""


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run ``nemo-grpo <arguments>`` on ``num_ranks`` ranks, each a process with one thread.

    Signals that ask a run to stop are passed on to every rank. When a rank fails, its traceback is on stderr,
    and the others are ended within `GRACE_SECONDS`.

    Returns:
        0 if all ranks returned 0, else the exit code of the first rank that failed. If signal N ended that
        rank, the code is 128 + N, as in a shell.
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
            # In a session of its own a rank does not get the terminal's Ctrl-C a second time: `pass_on` sends
            # it.
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
                # Without the wait the rank would stay as a zombie while this process lives.
                rank.wait()
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torch.distributed reads on a rank, as torchrun sets them."""
    return {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have ended, but after the first failure at most `GRACE_SECONDS` longer."""
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

    A port that is only looked up may be given to an outgoing connection before the server starts. So a socket
    holds the port. It does not listen and has SO_REUSEADDR, which lets torch's TCPStore, which sets that
    option, too, listen on the same port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
