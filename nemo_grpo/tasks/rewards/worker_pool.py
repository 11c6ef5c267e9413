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
"""The same for each response of a request with many, where the sum is more than `WALL_SECONDS`."""
MEMORY_BYTES = 2 << 30
REQUESTS_PER_WORKER = 5000
"""Requests after which a worker is replaced, because caches grow."""
READY = b"ready"


class WorkerPool:
    """Workers with one job; safe to use from several threads, each of which has a worker while it waits.

    Attributes: num_killed: workers that gave no reply within the limits.
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
        self.job, self.unready, self.prints = job, unready, prints
        self.arguments = (str(CPU_SECONDS), str(MEMORY_BYTES))
        self.num_killed = 0
        self._forget()
        _POOLS.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def ask(self, request: tuple[Any, ...], num_responses: int = 1) -> bytes | None:
        """Ask a worker; None: it died or was too slow. A reply is bytes, so a worker can do no harm by it.

        A second worker is asked if the first stood still, which need not be the request's fault.

        Args:   request: the job's arguments.  num_responses: in it; each has `CPU_SECONDS`.
        Raises: RuntimeError: no worker can be started.
        """
        for is_last in (False, True):
            worker, reply = self._ask_one(request, num_responses)
            if not worker.stood_still or is_last:
                break
        with self._lock:
            self.num_killed += reply is None
        return reply

    def _ask_one(self, request: Any, num_responses: int) -> tuple[_Worker, bytes | None]:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
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
    """One process and the connection to it.

    Attributes: stood_still: the last request had no reply though the worker could have run.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.num_requests = 0
        self.stood_still = False
        self._connection, theirs = multiprocessing.Pipe()
        output = 2 if pool.prints else subprocess.DEVNULL
        with theirs:
            # -P: the script's folder is no place to import from.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT), str(theirs.fileno()), *pool.arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # what the job starts ends with it
            )
        if self._ask(pool.job, STARTUP_SECONDS) != READY:
            self.end()
            raise RuntimeError(pool.unready)

    def answer(self, request: Any, num_responses: int, seconds: float) -> bytes | None:
        """Reply to a request; None: no reply in time, and the worker is unusable."""
        self.num_requests += 1
        reply = self._ask((self.num_requests, request, num_responses), seconds)
        number = numbered(self.num_requests, b"")
        return reply.removeprefix(number) if reply and reply.startswith(number) else None

    def _ask(self, message: Any, seconds: float) -> bytes | None:
        try:
            self._connection.send(message)
            self.stood_still = not self._replies_within(seconds)
            return None if self.stood_still else self._connection.recv_bytes() or None
        except (EOFError, OSError):
            return None

    def _replies_within(self, seconds: float) -> bool:
        """Wait for a reply, or the worker's end, for these seconds of time in which it could run."""
        start, waited = time.monotonic(), self._seconds_without_core()
        while (left := seconds - (time.monotonic() - start) + self._seconds_without_core() - waited) > 0:
            if self._connection.poll(left):
                return True
        return False

    def _seconds_without_core(self) -> float:
        """Time in which the worker was ready to run and had no core; 0 where the kernel does not say."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def kill(self) -> None:
        """End the process and all that it started at once, if it still runs."""
        if self._process.returncode is None:  # else the number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, wait for it and close the connection."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def abandon(self) -> None:
        """Release the parent's worker in a forked child, without disturbing it."""
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
