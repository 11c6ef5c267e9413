"""Expendable worker processes with limits on time and memory, for rewards.

A worker is a plain subprocess: no fork of a threaded process, no import of the caller's main module, so that
engine, evaluation, notebooks and Ray actors can all have one. A request that takes too much time or memory,
or that crashes the worker, has no reply; the next one gets a new worker. Workers exit with their parent: at
the end of their input, or by their own time limit. Pools of multiprocessing, and pebble's on top of it, give
less: they import the caller's main module or fork its threads, and a daemonic caller may not have one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

STARTUP_SECONDS = 120.0
REQUESTS_PER_WORKER = 5000
"""Requests after which a worker is replaced, because caches grow."""
READY = b"ready"


class WorkerPool:
    """Workers of one script; safe to use from several threads, each of which has a worker while it waits.

    Attributes: num_killed: workers that gave no reply within the limits.
    """

    def __init__(
        self,
        script: Path,
        unready: str,
        *,
        cpu_seconds: float = 3.0,
        wall_seconds: float = 60.0,
        memory_bytes: int = 2 << 30,
        greeting: Any = None,
        prints: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args: script: gets a connection's number, ``cpu_seconds`` and ``memory_bytes``; replies with bytes.
              unready: what to say if it does not start.
              cpu_seconds: CPU time of one request, which does not depend on the machine's load.
              wall_seconds: limit for the rest, such as a worker that was stopped.
              greeting: what a worker receives first.  prints: what it prints is shown on stderr.
        """
        self.script, self.unready, self.greeting, self.prints = script, unready, greeting, prints
        self.arguments = (str(cpu_seconds), str(memory_bytes))
        self.wall_seconds = wall_seconds
        self.num_killed = 0
        self._forget()
        _POOLS.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(self, request: Any) -> bytes | None:
        """A worker's reply, or None if it died or was too slow. A reply is bytes: no worker can harm by it.

        Raises: RuntimeError: no worker can be started.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
        with self._lock:
            self._busy.add(worker)
        reply = worker.ask(request, self.wall_seconds)
        with self._lock:
            self._busy.discard(worker)
            if reply is not None and worker.num_requests < REQUESTS_PER_WORKER:
                self._idle.append(worker)
                return reply
            self.num_killed += reply is None
        worker.end()
        return reply

    def close(self) -> None:
        """End all workers; the pool may be used again."""
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


class _Worker:
    """One process and the connection to it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.num_requests = 0
        self._connection, theirs = multiprocessing.Pipe()
        output = 2 if pool.prints else subprocess.DEVNULL
        with theirs:
            # -P: the script's folder is no place to import from.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(pool.script), str(theirs.fileno()), *pool.arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        if pool.greeting is not None:
            self._connection.send(pool.greeting)
        if self._reply(STARTUP_SECONDS) != READY:
            self.end()
            raise RuntimeError(pool.unready)

    def ask(self, request: Any, seconds: float) -> bytes | None:
        """The reply, or None if the worker died or was too slow; it is unusable then."""
        self.num_requests += 1
        try:
            self._connection.send(request)
        except OSError:
            return None
        return self._reply(seconds) or None

    def _reply(self, seconds: float) -> bytes:
        """None of it if the process exits or time runs out."""
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


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        pool._after_fork_in_child()


def close_all() -> None:
    """End the workers of every pool of this process."""
    for pool in list(_POOLS):
        pool.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_all)
