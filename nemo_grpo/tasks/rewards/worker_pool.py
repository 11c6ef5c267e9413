"""Expendable worker processes with limits on time and memory, for rewards.

A worker is a plain subprocess: no fork of a threaded process, no import of the caller's main module, so that
engine, evaluation, notebooks and Ray actors can all have one. A request that takes too much time or memory,
or that crashes the worker, has no reply; the next one gets a new worker. No verdict depends on the machine's
load: the limit is on CPU time, and a worker stands still only if it could have run. Workers exit with their
parent: at the end of their input, or by their own time limit.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_grpo.tasks.rewards.worker import numbered

SCRIPT = Path(__file__).with_name("worker.py")
STARTUP_SECONDS = 120.0
CPU_SECONDS = 3.0
"""CPU time of one response, which does not depend on the machine's load."""
WALL_SECONDS = 60.0
"""Time in which a worker could have run, without the time in which it waited for a core. It bounds a request
whose worker uses no CPU time, such as one that was stopped."""
WALL_SECONDS_PER_RESPONSE = 10.0
"""Time for each response of a request with several; it applies if their sum exceeds `WALL_SECONDS`."""
MEMORY_BYTES = 2 << 30
REQUESTS_PER_WORKER = 5000
"""Requests after which a worker is replaced, because caches grow."""
READY = b"ready"


class WorkerPool:
    """Workers with one job; safe to use from several threads, each of which has a worker while it waits.

    Attributes:
        job: a name of `worker.JOBS` and its arguments.
        arguments: limits of a worker, as its command line gets them.
        num_killed: number of workers that gave no reply within the limits.
    """

    def __init__(
        self,
        job: tuple[Any, ...],
        unready: str,
        *,
        prints: bool = False,
    ) -> None:
        """Store the job; the first request starts a worker.

        Args:
            job: a name of `worker.JOBS` and its arguments.
            unready: error message if no worker starts.
            prints: show on stderr what a worker prints.
        """
        self.job = job
        self.unready = unready
        self.prints = prints
        self.arguments = (str(CPU_SECONDS), str(MEMORY_BYTES))
        self.num_killed = 0
        self._forget()
        _POOLS.add(self)

    def _forget(self) -> None:
        """Begin without workers, and with a new lock: a fork may copy one that another thread holds."""
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(self, request: tuple[Any, ...], num_responses: int = 1) -> bytes | None:
        """Ask a worker; return None if it died or was too slow.

        Args:
            request: the job's arguments.
            num_responses: responses in the request; each has `CPU_SECONDS`.

        Raises:
            RuntimeError: no worker can be started.
        """
        worker, reply = self._ask_one(request, num_responses)
        if worker.stood_still:
            # Ask once more: the worker may have been stopped from outside, for which the request is not to
            # blame.
            _, reply = self._ask_one(request, num_responses)
        if reply is None:
            with self._lock:
                self.num_killed += 1
        return reply

    def _ask_one(self, request: Any, num_responses: int) -> tuple[_Worker, bytes | None]:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            # Without the lock, because the start of a process takes seconds.
            worker = _Worker(self)
        with self._lock:
            self._busy.add(worker)
        seconds = max(WALL_SECONDS, WALL_SECONDS_PER_RESPONSE * num_responses)
        reply = worker.answer(request, num_responses, seconds)
        with self._lock:
            self._busy.discard(worker)
            if reply is not None and worker.num_requests < REQUESTS_PER_WORKER:
                self._idle.append(worker)
                return worker, reply
        worker.end()
        return worker, reply

    def close(self) -> None:
        """End all workers; the pool may be used again."""
        with self._lock:
            idle = self._idle
            self._idle = []
            for worker in self._busy:
                # The thread that waits for this worker sees the end of its output and cleans up.
                worker.kill()
        for worker in idle:
            worker.end()

    def after_fork_in_child(self) -> None:
        """Leave the parent's workers to the parent."""
        for worker in (*self._idle, *self._busy):
            worker.abandon()
        self._forget()


class _Worker:
    """One process and the connection to it.

    Attributes:
        num_requests: number of requests so far.
        stood_still: the last request had no reply though the worker could have run.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.num_requests = 0
        self.stood_still = False
        self._connection, worker_end = multiprocessing.Pipe()
        # 2 is the process's real stderr; the stderr object of a notebook or of pytest has no file descriptor.
        output = 2 if pool.prints else subprocess.DEVNULL
        with worker_end:
            # -P keeps the script's folder off sys.path. The process gets its own group, so that all that the
            # job starts is killed with it, and Ctrl-C in a terminal reaches only the parent.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT), str(worker_end.fileno()), *pool.arguments],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        if self._ask(pool.job, STARTUP_SECONDS) != READY:
            self.end()
            raise RuntimeError(pool.unready)

    def answer(self, request: Any, num_responses: int, seconds: float) -> bytes | None:
        """Send a request and return its reply; None means that the worker must not be used again."""
        self.num_requests += 1
        reply = self._ask((self.num_requests, request, num_responses), seconds)
        # A user's function can write to the connection, so a reply must have the number of this request.
        number = numbered(self.num_requests, b"")
        if reply is None or not reply.startswith(number):
            return None
        return reply.removeprefix(number)

    def _ask(self, message: Any, seconds: float) -> bytes | None:
        try:
            self._connection.send(message)
            self.stood_still = not self._replies_within(seconds)
            if self.stood_still:
                return None
            # Read bytes. `recv` would unpickle them, and so run whatever a user's function has sent.
            return self._connection.recv_bytes() or None
        except (EOFError, OSError):
            return None

    def _replies_within(self, seconds: float) -> bool:
        """Wait for a reply, or the worker's end, for these seconds of time in which it could run."""
        start = time.monotonic()
        waited_at_start = self._seconds_without_core()
        while True:
            # Time in which the worker waited for a core does not count, so add it to the remaining time.
            waited = self._seconds_without_core() - waited_at_start
            remaining = seconds + waited - (time.monotonic() - start)
            if remaining <= 0:
                return False
            if self._connection.poll(remaining):
                return True

    def _seconds_without_core(self) -> float:
        """Return the time in which the worker was ready to run but had no core; 0 if it is not counted."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def kill(self) -> None:
        """End the process and all that it started at once, if it still runs."""
        # Once the process was waited for, its pid may belong to another process.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, wait for it and close the connection."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def abandon(self) -> None:
        """Release the parent's worker in a forked child, without disturbing it."""
        # With a return code, Popen's destructor does not warn of a process that is not a child of this one.
        self._process.returncode = 0
        self._connection.close()


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        pool.after_fork_in_child()


def close_all() -> None:
    """End the workers of every pool of this process."""
    for pool in list(_POOLS):
        pool.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_all)
