"""Problems that this package generates: no network needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nemo_grpo.data.fields import Entry, Row
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.arithmetic import ArithmeticConfig
from nemo_grpo.tasks.logic import LogicConfig

SEED = 0


@dataclass(frozen=True)
class Generated:
    """Training or held-out problems of a task with a generator; always the same ones.

    Attributes: name: the task's.  people: sizes of puzzles, equally often; empty for arithmetic.
    """

    name: str
    num_problems: int
    held_out: bool
    people: tuple[int, ...] = ()
    revision: str | None = None

    @property
    def label(self) -> str:
        what = "held-out" if self.held_out else f"seed {SEED}"
        return f"generated ({self.name}, {what})"

    def instructions(self, revision: str | None) -> str:
        return "generate it here"

    def resolve(self, revision: str | None) -> str:
        return f"seed {SEED}"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        task = self._task()
        problems = task.validation_problems(self.num_problems) if self.held_out else self._training(task)
        for problem in sorted(problems, key=lambda problem: problem.metadata.get("num_people", 0)):
            yield {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}

    def _task(self) -> Task:
        if self.people:
            return LogicConfig(people=self.people, validation_people=self.people).build()
        return ArithmeticConfig().build()

    def _training(self, task: Task) -> list[Problem]:
        """Each problem once, each size equally often."""
        num_sizes = max(1, len(self.people))
        wanted = self.num_problems // num_sizes
        found: dict[str, Problem] = {}
        sizes: Counter[int] = Counter()
        indices = count()
        while len(found) < wanted * num_sizes:
            problem = task.train_problem(next(indices), SEED)
            size = problem.metadata.get("num_people", 0)
            if problem.id not in found and sizes[size] < wanted:
                found[problem.id] = problem
                sizes[size] += 1
        return list(found.values())


def generated(row: Row) -> Entry:
    """A problem as it was generated."""
    return Entry(row["question"], row["answer"], dict(row["metadata"]))
