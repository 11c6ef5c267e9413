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
    """One side's measurements: CPU and wall time of as many steps as it is told, reported on stdout."""

    def __init__(self) -> None:
        self.steps = WARM_UP_STEPS
        self._begin()

    def _begin(self) -> None:
        self.notes: list[dict[str, float]] = []
        self.cpu, self.wall = sum(os.times()[:4]), time.perf_counter()  # with finished children

    def step_done(self, **note: float) -> bool:
        """Count a step with its measurements; returns False if no more steps are wanted."""
        self.notes.append(note)
        if len(self.notes) < self.steps:
            return True
        cpu, wall = sum(os.times()[:4]) - self.cpu, time.perf_counter() - self.wall
        means = {name: statistics.mean(note[name] for note in self.notes) for name in note}
        print(MARK + json.dumps({"cpu": cpu / self.steps, "wall": wall / self.steps} | means), flush=True)
        self.steps = int(sys.stdin.readline() or 0)
        self._begin()
        return self.steps > 0


class Side:
    """A side's process, which imports from ``root``; its stderr goes to ``log``."""

    def __init__(self, command: Sequence[str], root: Path, log: Path) -> None:
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
        self.process: Any = Popen(
            command, env=environment, text=True, stdin=PIPE, stdout=PIPE, stderr=log.open("w")
        )
        self.results: list[dict[str, float]] = []
        self._answer()  # the warm-up

    def _answer(self) -> dict[str, float]:
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[1:]))
        raise SystemExit(f"{self.log} ends with:\n" + "\n".join(self.log.read_text().splitlines()[-15:]))

    def turn(self, steps: int) -> None:
        """Measure some steps."""
        print(steps, file=self.process.stdin, flush=True)
        self.results.append(self._answer())

    def median(self, name: str) -> float:
        return statistics.median(result[name] for result in self.results)
