"""Sums and differences of whole numbers, worked out column by column from the units."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from nemo_grpo.tasks.base import (
    HELD_OUT_SHARE,
    Problem,
    TaskConfig,
    check_num_validation,
    distinct,
    is_held_out,
    stream,
)
from nemo_grpo.tasks.response import exact_match, extract_answer, render_response


class ArithmeticConfig(TaskConfig):
    """Parameters of `Arithmetic`."""

    name: Literal["arithmetic"] = "arithmetic"
    num_digits: int = Field(default=2, ge=1, le=9)
    """Digits of each operand; none begins with 0."""
    operations: tuple[Literal["+", "-"], ...] = Field(default=("+",), min_length=1, strict=False)
    """Drawn from uniformly; differences are never negative."""

    def build(self) -> Arithmetic:
        return Arithmetic(self)


class Arithmetic:
    """``What is 47 + 38?``; a fifth of all pairs of operands is held out, in either order, per operation."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config

    def train_problem(self, index: int, seed: int) -> Problem:
        return self._draw(stream(self.config.name, seed, index), held_out=False)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        # Half of the held-out unordered pairs: drawing the last ones would take long.
        num_operands = 9 * 10 ** (self.config.num_digits - 1)
        available = len(set(self.config.operations)) * num_operands**2 // (2 * 2 * HELD_OUT_SHARE)
        source = f"{self.config.name} with num_digits={self.config.num_digits}"
        check_num_validation(num_problems, available, source)
        rng = stream(self.config.name, "validation")
        return distinct(lambda _: self._draw(rng, held_out=True), num_problems)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """One equation per column: digit, digit, carry (or borrow) = column's result."""
        left, operation, right = (problem.metadata[key] for key in ("left", "operation", "right"))
        width = max(len(str(left)), len(str(right)))
        columns, carry = [], 0
        for x, y in zip(_digits(left, width), _digits(right, width), strict=True):
            if operation == "+":
                value, next_carry = x + y + carry, (x + y + carry) // 10
            else:
                next_carry = int(x < y + carry)
                x += 10 * next_carry
                value = x - y - carry
            columns.append(f"{x}{operation}{y}{operation}{carry}={value}")
            carry = next_carry
        return render_response(" ".join(columns), problem.answer)

    def extract(self, response: str) -> str | None:
        return extract_answer(response)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        return exact_match(problem.answer, response)

    def _draw(self, rng: random.Random, *, held_out: bool) -> Problem:
        while True:
            operation = rng.choice(self.config.operations)
            smallest = 10 ** (self.config.num_digits - 1)
            left, right = (rng.randrange(smallest, 10 * smallest) for _ in range(2))
            if operation == "-" and left < right:
                left, right = right, left
            if is_held_out((operation, *sorted((left, right)))) == held_out:
                return _problem(left, operation, right)


def _digits(number: int, width: int) -> list[int]:
    """Units first."""
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _problem(left: int, operation: str, right: int) -> Problem:
    return Problem(
        id=f"{left}{operation}{right}",
        question=f"What is {left} {operation} {right}?",
        answer=str(left + right if operation == "+" else left - right),
        metadata={"left": left, "operation": operation, "right": right},
    )
