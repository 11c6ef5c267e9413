"""The process that calls a user's reward function; `own_reward` starts it as a script.

A request is the function's arguments by name; the reply is JSON, ``{"values": [..]}`` or ``{"error": ".."}``.
The kernel kills the process if a request takes too much CPU time, even if the parent is gone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def main(connection: Connection, cpu_seconds: float, memory_bytes: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.path[:], files, reference = connection.recv()
    from nemo_grpo import extensions

    extensions.receive_files(files)
    function = extensions.load(reference, "nemo_grpo.rewards")
    connection.send_bytes(b"ready")
    while True:
        try:
            arguments, count = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds * (count or 1))
        try:
            reply = {"values": numbers(function, arguments, count)}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"error": extensions.place_of(error, reference.rpartition(":")[0])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(reply).encode())


def numbers(function: Callable[..., Any], arguments: dict[str, Any], count: int | None) -> list[float]:
    """The function's value, or its ``count`` values."""
    value = function(**arguments)
    values = [value] if count is None else list(value)
    if count is not None and len(values) != count:
        raise ValueError(f"{len(values)} values for {count} responses")
    for one in values:
        if one is None or isinstance(one, str):
            raise TypeError(f"{one!r} instead of a number")
    return [float(one) for one in values]


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
