"""Compares mathematical answers by math-verify, in expendable worker processes.

A worker is a plain subprocess: no fork of a threaded process, no import of the caller's main module, so that
engine, evaluation, notebooks and Ray actors can all have one. An answer that takes too much time or memory,
or that crashes the worker, is wrong; the next one gets a new worker. Workers exit with their parent: at the
end of their input, or by their own time limit. Pools of multiprocessing, and pebble's on top of it, give
less: they import the caller's main module or fork its threads, and a daemonic caller may not have one.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

from nemo_grpo.tasks.rewards.final_answer import normalized

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("math_worker.py")
STARTUP_SECONDS = 120.0
REQUESTS_PER_WORKER = 5000
"""Requests after which a worker is replaced, because symbolic caches grow."""
CACHE_SIZE = 20_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
"""Two of these are equal only if their texts are, so no worker is needed."""
Key = TypeVar("Key")
Value = TypeVar("Value")


class MathGrader:
    """Compares answers; safe to call from several threads, each of which has a worker while it waits."""

    def __init__(
        self, *, cpu_seconds: float = 3.0, wall_seconds: float = 60.0, memory_bytes: int = 2 << 30
    ) -> None:
        """Starts nothing yet.

        Args: cpu_seconds: CPU time of one comparison, which does not depend on the machine's load.
              wall_seconds: limit for the rest, such as a worker that was stopped.
        """
        self.arguments = (str(cpu_seconds), str(memory_bytes))
        self.wall_seconds = wall_seconds
        self.num_killed = 0
        self._forget()
        _GRADERS.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._known: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._undecided: OrderedDict[tuple[str, str], None] = OrderedDict()

    def equal(self, reference: str, answer: str) -> bool:
        """True if the answer is the reference, as text or as mathematics; False for anything pathological.

        Raises: RuntimeError: no worker can be started (math-verify is not installed).
        """
        verdict = self._verdict(reference, answer)
        if verdict is None:
            with self._lock:
                _remember(self._undecided, (normalized(reference), normalized(answer)), None)
        return bool(verdict)

    def undecided(self, reference: str, answer: str) -> bool:
        """Whether `equal` had no verdict on the two; either may be the cause, for this problem only."""
        with self._lock:
            return (normalized(reference), normalized(answer)) in self._undecided

    def same(self, one: str, other: str) -> bool | None:
        """Whether two answers of a vote are equal; None: no verdict within the limits."""
        return self._verdict(one, other)

    def _verdict(self, reference: str, answer: str) -> bool | None:
        one, other = normalized(reference), normalized(answer)
        if one == other:
            return bool(one)
        if not needs_worker(one, other):
            return False
        pair = (reference, answer)
        with self._lock:
            if pair in self._known:
                return self._known[pair]
        verdict = self._ask(*pair)
        with self._lock:
            _remember(self._known, pair, verdict)
        return verdict

    def _ask(self, reference: str, answer: str) -> bool | None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self.arguments)
        with self._lock:
            self._busy.add(worker)
        verdict = worker.ask(reference, answer, self.wall_seconds)
        with self._lock:
            self._busy.discard(worker)
            if verdict is not None and worker.num_requests < REQUESTS_PER_WORKER:
                self._idle.append(worker)
                return verdict
            self.num_killed += verdict is None
        if verdict is None:
            log.info("no verdict within the limits, so 0: %.60r against %.60r", answer, reference)
        worker.end()
        return verdict

    def close(self) -> None:
        """End all workers; the grader may be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()  # its waiting thread sees the end of its output and cleans up
        for worker in idle:
            worker.end()

    def _after_fork_in_child(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.abandon()
        self._forget()


def needs_worker(one: str, other: str) -> bool:
    """Whether two different normalised answers can be equal as mathematics: two integers cannot."""
    return not (_INTEGER.fullmatch(one) and _INTEGER.fullmatch(other))


def _remember(cache: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


class _Worker:
    """One process and the connection to it."""

    def __init__(self, arguments: tuple[str, str]) -> None:
        self.num_requests = 0
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            # -P: the script's folder is no place to import from.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if self._reply(STARTUP_SECONDS) != b"ready":
            self.end()
            raise RuntimeError(
                f"the worker that compares answers did not start; is math-verify in {sys.executable}?"
            )

    def ask(self, reference: str, answer: str, seconds: float) -> bool | None:
        """The verdict, or None if the worker died or was too slow; it is unusable then."""
        self.num_requests += 1
        try:
            self._connection.send((reference, answer))
        except OSError:
            return None
        return {b"1": True, b"0": False}.get(self._reply(seconds))

    def _reply(self, seconds: float) -> bytes:
        """Bytes, which no worker can make dangerous; none if the process exits or time runs out."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else b""
        except (EOFError, OSError):
            return b""

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for it and close the connection."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's worker without disturbing it."""
        self._process.returncode = 0  # else its destructor would warn about a process that is not ours
        self._connection.close()


_GRADERS: weakref.WeakSet[MathGrader] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for grader in list(_GRADERS):
        grader._after_fork_in_child()


def _at_exit() -> None:
    for grader in list(_GRADERS):
        grader.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

SHARED = MathGrader()
"""The one that the tasks of this process use."""
