"""The process that compares mathematical expressions; `math_grader` starts it as a script.

A request is ``(reference, answer)``; the reply is the byte ``1`` or ``0``. The kernel kills the process if a
request takes too much CPU time, even if the parent is gone; memory is limited likewise. Imports nothing of
this package, which would bring in torch.
"""

from __future__ import annotations

import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any


def main(connection: Connection, cpu_seconds: float, memory_bytes: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    equal = comparison()
    equal("1/2", "0.5")
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        verdict = equal(*request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(b"%d" % verdict)


def comparison() -> Any:
    """(reference, answer) -> whether math-verify takes the two for equal; never raises."""
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", targets, parsing_timeout=None)

    def equal(reference: str, answer: str) -> bool:
        try:
            # Its own limits are alarms, which code in C does not notice: SIGPROF stands in for them.
            return bool(verify(read(reference), read(answer), timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):
            return False

    return equal


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
