"""Fractions: right values, demonstrations that reduce nothing, and problems that never change sides."""

import random
from fractions import Fraction

import pytest

from nemo_grpo.tasks import Problem, parse_task


def task(**parameters):
    return parse_task({"name": "fractions", **parameters}).build()


@pytest.mark.parametrize(
    ("left", "operation", "right", "thought", "answer"),
    [
        ((1, 2), "+", (1, 6), "1*6=6 1*2=2 6+2=8 2*6=12", r"\boxed{\frac{8}{12}}"),
        ((2, 3), "-", (1, 2), "2*2=4 1*3=3 4-3=1 3*2=6", r"\boxed{\frac{1}{6}}"),
        ((2, 3), "*", (3, 4), "2*3=6 3*4=12", r"\boxed{\frac{6}{12}}"),
    ],
)
def test_demonstration_by_hand(left, operation, right, thought, answer):
    problem = Problem("x", "", "", {"left": left, "operation": operation, "right": right})
    expected = f"<think>{thought}</think><answer>{answer}</answer>"
    assert task().demonstration(problem, random.Random(0)) == expected


def test_answers_are_reduced_and_right_and_never_negative():
    seen = set()
    for problem in task().validation_problems(300):
        left, operation, right = problem.question.removeprefix("What is ").removesuffix("?").split()
        a, b = Fraction(left), Fraction(right)
        value = {"+": a + b, "-": a - b, "*": a * b}[operation]
        assert value >= 0
        expected = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
        assert problem.answer == (expected if value.denominator > 1 else str(value.numerator))
        seen.add(operation)
    assert seen == {"+", "-", "*"}


def test_denominators_stay_below_the_largest():
    pairs = [task(max_denominator=4).train_problem(i, 0).metadata["left"] for i in range(200)]
    assert {bottom for _, bottom in pairs} == {2, 3, 4}
    assert all(0 < top < bottom for top, bottom in pairs)


def test_value_counts_and_not_its_spelling():
    fractions = task()
    problem = Problem("x", "q", r"\frac{3}{4}")
    for answer, accuracy in [(r"\boxed{\frac{6}{8}}", 1.0), ("0.75", 1.0), (r"$\frac{3}{5}$", 0.0)]:
        response = f"<think>a</think><answer>{answer}</answer>"
        assert fractions.score(problem, response) == {"accuracy": accuracy, "format": 1.0}
