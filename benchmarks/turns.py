"""Processes that are measured in turns of a few steps, so that other load meets all alike."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

WARM_UP_STEPS = 3
MARK = "@"
"""First character of a side's output lines that hold results."""


class Turns:
    """Measures one side: CPU and wall time of as many steps as stdin asks for, reported on stdout."""

    def __init__(self) -> None:
        self.steps = WARM_UP_STEPS
        self._begin()

    def _begin(self) -> None:
        self.measurements: list[dict[str, float]] = []
        self.cpu_at_start = _cpu_seconds()
        self.wall_at_start = time.perf_counter()

    def step_done(self, **measurement: float) -> bool:
        """Count a step with its measurements, and return False if no more steps follow."""
        self.measurements.append(measurement)
        if len(self.measurements) < self.steps:
            return True
        cpu = _cpu_seconds() - self.cpu_at_start
        wall = time.perf_counter() - self.wall_at_start
        means = {"cpu": cpu / self.steps, "wall": wall / self.steps}
        for name in measurement:
            means[name] = statistics.mean(row[name] for row in self.measurements)
        print(MARK + json.dumps(means), flush=True)
        # The next line says how many steps come next. An empty one means that the parent has ended.
        self.steps = int(sys.stdin.readline() or 0)
        self._begin()
        return self.steps > 0


def _cpu_seconds() -> float:
    """Return user and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Side:
    """A side's process, which imports from ``root``; its stderr goes to ``log``."""

    def __init__(self, command: Sequence[str], root: Path, log: Path) -> None:
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
        self.process: Any = Popen(
            command, env=environment, text=True, stdin=PIPE, stdout=PIPE, stderr=log.open("w")
        )
        self.results: list[dict[str, float]] = []
        # The first answer is about the warm-up, which does not count.
        self._answer()

    def _answer(self) -> dict[str, float]:
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[1:]))
        raise SystemExit(f"{self.log} ends with:\n" + "\n".join(self.log.read_text().splitlines()[-15:]))

    def turn(self, steps: int) -> None:
        """Let the side make some steps, and add their means to the results."""
        print(steps, file=self.process.stdin, flush=True)
        self.results.append(self._answer())

    def median(self, name: str) -> float:
        return statistics.median(result[name] for result in self.results)
