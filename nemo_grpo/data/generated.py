"""Puzzles that this package generates: no network needed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nemo_grpo.data.fields import Entry, Row
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.logic import LogicConfig

SEED = 0


@dataclass(frozen=True)
class Generated:
    """Training or held-out problems of the task `logic`; always the same ones.

    Attributes: people: sizes of puzzles, equally often.
    """

    num_problems: int
    held_out: bool
    people: tuple[int, ...]
    revision: str | None = None

    @property
    def label(self) -> str:
        what = "held-out" if self.held_out else f"seed {SEED}"
        return f"generated (logic, {what})"

    def instructions(self, revision: str | None) -> str:
        return "generate it here"

    def resolve(self, revision: str | None) -> str:
        return f"seed {SEED}"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        task = LogicConfig(people=self.people, validation_people=self.people).build()
        problems = task.validation_problems(self.num_problems) if self.held_out else self._training(task)
        for problem in sorted(problems, key=lambda problem: problem.metadata["num_people"]):
            yield {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}

    def _training(self, task: Task) -> list[Problem]:
        """Each problem once, each size equally often."""
        wanted = self.num_problems // len(self.people)
        found: dict[str, Problem] = {}
        sizes: Counter[int] = Counter()
        indices = count()
        while len(found) < wanted * len(self.people):
            problem = task.train_problem(next(indices), SEED)
            size = problem.metadata["num_people"]
            if problem.id not in found and sizes[size] < wanted:
                found[problem.id] = problem
                sizes[size] += 1
        return list(found.values())


def generated(row: Row) -> Entry:
    """A problem as it was generated."""
    return Entry(row["question"], row["answer"], dict(row["metadata"]))
