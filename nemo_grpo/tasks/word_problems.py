"""Word problems in two steps, for a model that reads English; graded like the task `math`."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from nemo_grpo.tasks.base import Problem, TaskConfig, check_num_validation, distinct, is_held_out, stream
from nemo_grpo.tasks.mathematics import MathematicalAnswers
from nemo_grpo.tasks.rewards.format_reward import Form, demonstrated_form

NAMES = ("Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lena", "Maria")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")
MORE = ("buys {} more", "finds {} more", "gets {} from a friend", "is given {} by an uncle")
LESS = ("gives away {}", "loses {}", "sells {}", "leaves {} at school")


class WordProblemsConfig(TaskConfig):
    """Parameters of `WordProblems`."""

    name: Literal["word_problems"] = "word_problems"
    max_number: int = Field(default=50, ge=10, le=999)
    """Numbers of a problem go from 2 to this one; what is left is never negative."""
    form: Form = "boxed"
    """Form that ``format`` rewards, as for the task math."""

    def build(self) -> WordProblems:
        return WordProblems(self)


class WordProblems(MathematicalAnswers):
    """``Ada has 17 eggs. She ..``: one addition and one subtraction, either first.

    A fifth of all triples of numbers is held out, in every story.
    """

    def __init__(self, config: WordProblemsConfig) -> None:
        self.config = config

    def train_problem(self, index: int, seed: int) -> Problem:
        return self._draw(stream(self.config.name, seed, index), held_out=False)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        # Of all triples of numbers a fifth is held out, and most of these have a story without a negative
        # count. A twentieth of all is a safe limit: `distinct` draws until it has found so many.
        available = (self.config.max_number - 1) ** 3
        source = f"{self.config.name} with max_number={self.config.max_number}"
        check_num_validation(num_problems, available // 20, source)
        rng = stream(self.config.name, "validation")
        return distinct(lambda _: self._draw(rng, held_out=True), num_problems)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Write both steps as equations, then the answer in the form that ``format`` rewards."""
        start, first, second = problem.metadata["numbers"]
        between = start + first
        steps = f"{_equation(start, first)}, {_equation(between, second)}."
        return demonstrated_form(steps, problem.answer, self.config.form)

    def _draw(self, rng: random.Random, *, held_out: bool) -> Problem:
        while True:
            numbers = tuple(rng.randint(2, self.config.max_number) for _ in range(3))
            more_first = rng.random() < 0.5
            story = _problem(rng, numbers, more_first)
            if story is not None and is_held_out(numbers) == held_out:
                return story


def _problem(rng: random.Random, numbers: tuple[int, ...], more_first: bool) -> Problem | None:
    """Tell a story about the numbers; None if a count would be negative."""
    start, first, second = numbers
    changes = (first, -second) if more_first else (-first, second)
    if start + changes[0] < 0 or start + sum(changes) < 0:
        return None
    name = rng.choice(NAMES)
    objects = rng.choice(THINGS)
    phrases = [rng.choice(MORE if change > 0 else LESS).format(abs(change)) for change in changes]
    return Problem(
        id="".join(f"{number:+d}" for number in (start, *changes)),
        question=f"{name} has {start} {objects}. {name} {phrases[0]} and then {phrases[1]}. "
        f"How many {objects} does {name} have now?",
        answer=str(start + sum(changes)),
        metadata={"numbers": [start, *changes]},
    )


def _equation(value: int, change: int) -> str:
    sign = "+" if change > 0 else "-"
    return f"{value} {sign} {abs(change)} = {value + change}"
