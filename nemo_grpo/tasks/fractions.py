r"""Sums, differences and products of fractions: mathematics without a download, graded as the task `math` is.

References are reduced, demonstrations reduce nothing: ``\frac{6}{8}`` for ``\frac{3}{4}`` is right because
math-verify compares values.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Literal

from pydantic import Field

from nemo_grpo.tasks.base import Problem, TaskConfig, check_num_validation, is_held_out, stream
from nemo_grpo.tasks.mathematics import MathematicalAnswers
from nemo_grpo.tasks.response import render_response
from nemo_grpo.tasks.rewards.forms import Form

Pair = tuple[int, int]
"""Numerator and denominator as written."""

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class FractionsConfig(TaskConfig):
    """Parameters of `Fractions`."""

    name: Literal["fractions"] = "fractions"
    max_denominator: int = Field(default=9, ge=3, le=99)
    """Denominators go from 2 to this one, numerators from 1 to below the denominator."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(
        default=("+", "-", "*"), min_length=1, strict=False
    )
    """Drawn from uniformly; differences are never negative."""
    form: Form = "think_answer"
    """What ``format`` rewards, as for the task math."""

    def build(self) -> Fractions:
        return Fractions(self)


class Fractions(MathematicalAnswers):
    """``What is 1/2 + 2/3?``; a fifth of all pairs is held out, in either order, per operation."""

    def __init__(self, config: FractionsConfig) -> None:
        self.config = config
        fractions = [
            (top, bottom) for bottom in range(2, config.max_denominator + 1) for top in range(1, bottom)
        ]
        problems: list[Problem] = []
        held_out: list[Problem] = []
        for operation, left, right in product(dict.fromkeys(config.operations), fractions, fractions):
            if operation == "-" and Fraction(*left) < Fraction(*right):
                continue
            kept = is_held_out((operation, *sorted((left, right))))
            (held_out if kept else problems).append(_problem(left, operation, right))
        stream(config.name, "validation").shuffle(held_out)
        self._train, self._held_out = problems, held_out

    def train_problem(self, index: int, seed: int) -> Problem:
        return stream(self.config.name, seed, index).choice(self._train)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        source = f"{self.config.name} with max_denominator={self.config.max_denominator}"
        check_num_validation(num_problems, len(self._held_out), source)
        return self._held_out[:num_problems]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The new numerator (for sums and differences from crosswise products), then the new denominator."""
        (a, b), operation, (c, d) = (problem.metadata[key] for key in ("left", "operation", "right"))
        if operation == "*":
            top, steps = a * c, f"{a}*{c}={a * c}"
        else:
            top = a * d + c * b if operation == "+" else a * d - c * b
            steps = f"{a}*{d}={a * d} {c}*{b}={c * b} {a * d}{operation}{c * b}={top}"
        return render_response(f"{steps} {b}*{d}={b * d}", rf"\boxed{{\frac{{{top}}}{{{b * d}}}}}")


def _problem(left: Pair, operation: str, right: Pair) -> Problem:
    value = OPERATIONS[operation](Fraction(*left), Fraction(*right))
    (a, b), (c, d) = left, right
    return Problem(
        id=f"{a}/{b}{operation}{c}/{d}",
        question=f"What is {a}/{b} {operation} {c}/{d}?",
        answer=rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value),
        metadata={"left": left, "operation": operation, "right": right},
    )
