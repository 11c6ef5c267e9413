"""Progress of a driver, by its log and the CPU time of its processes.

A fixed limit ends a slow run on a busy machine and waits too long for a dead one on a quiet machine.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

QUIET = 45.0
"""Seconds without a line in the log after which the CPU time decides."""
SILENT = 1800.0
"""Seconds without a line in the log after which a driver counts as stuck, however busy it is."""
IDLE = 0.2
"""CPU cores that a stack which works uses at least; Ray alone uses about 0.05."""
TICKS = os.sysconf("SC_CLK_TCK")


class Stuck(Exception):
    """Nothing moves any more; the message says since when."""


class Progress:
    """Watches one start of the driver.

    Args: logs: files that grow while it works.  sessions: of its processes and of Ray's.
    """

    def __init__(
        self,
        logs: Iterable[Path],
        sessions: Iterable[int],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[frozenset[int]], float] | None = None,
    ) -> None:
        self.logs, self.sessions, self.clock = tuple(logs), frozenset(sessions), clock
        self.cpu_seconds = cpu_seconds or cpu_seconds_of
        self.sizes = self._sizes()
        self.said = self.looked = clock()
        self.used = self.cpu_seconds(self.sessions)

    def check(self) -> None:
        """Call it every now and then.

        Raises: Stuck: nothing was logged and the processes were idle for `QUIET`, or nothing for `SILENT`.
        """
        now, sizes = self.clock(), self._sizes()
        if sizes != self.sizes:
            self.sizes, self.said = sizes, now
            self._mark(now)
        elif now - self.said > SILENT:
            raise Stuck(f"nothing was logged for {now - self.said:.0f} s")
        elif now - self.looked > QUIET:
            used = (self.cpu_seconds(self.sessions) - self.used) / (now - self.looked)
            if 0 <= used < idle_share():  # less than none: a process has ended, so something happened
                raise Stuck(f"nothing was logged for {now - self.said:.0f} s, with {used:.2f} CPU cores busy")
            self._mark(now)

    def _mark(self, now: float) -> None:
        self.looked, self.used = now, self.cpu_seconds(self.sessions)

    def _sizes(self) -> tuple[int, ...]:
        return tuple(path.stat().st_size if path.exists() else 0 for path in self.logs)


def idle_share() -> float:
    """`IDLE`, less on a machine with more work than cores."""
    return IDLE / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def cpu_seconds_of(sessions: frozenset[int]) -> float:
    """CPU time of all living processes of these sessions and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) in sessions:
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS
