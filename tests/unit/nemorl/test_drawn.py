"""Components of drawn responses: whole groups, newest turns, nothing twice."""

import pytest

from nemo_grpo.nemorl.callbacks import DrawnScores
from nemo_grpo.tasks.base import NOT_FINITE


def scores(accuracy: float, form: float = 1.0) -> dict[str, float]:
    return {"accuracy": accuracy, "format": form}


def test_shares_and_means_of_all_groups_then_nothing():
    drawn = DrawnScores(2)
    for problem, accuracies in {"a": (1, 1), "b": (0, 0), "c": (0, 1), "d": (0, 0)}.items():
        for accuracy in accuracies:
            drawn.note(problem, scores(accuracy, 0.5))
    drawn.by_problem["c"][5] |= {NOT_FINITE: 1.0}
    assert drawn.take() == {
        "rollout/all_right": 0.25,
        "rollout/all_wrong": 0.5,
        "reward/accuracy": 0.375,
        "reward/format": 0.5,
        f"reward/{NOT_FINITE}": 0.125,
    }
    assert drawn.take() == {}


def test_a_problem_drawn_twice_makes_two_groups():
    drawn = DrawnScores(2)
    for accuracy in (1, 1, 0, 0):
        drawn.note("a", scores(accuracy))
    assert drawn.take()["rollout/all_right"] == 0.5


def test_the_last_turn_of_a_response_counts():
    drawn = DrawnScores(2)
    first, second = (drawn.note("a", scores(0)) for _ in range(2))
    assert drawn.note("a", scores(1), first) == first
    drawn.note("a", scores(1), second)
    assert drawn.take()["reward/accuracy"] == 1


def test_a_part_of_a_group_waits_for_its_rest():
    drawn = DrawnScores(3)
    first, *_ = [drawn.note("a", scores(1)) for _ in range(4)]
    assert drawn.take()["reward/accuracy"] == 1
    drawn.note("a", scores(0), first)  # a late turn of a group that was taken
    for _ in range(2):
        drawn.note("a", scores(0))
    assert drawn.take()["reward/accuracy"] == pytest.approx(1 / 3)


def test_validation_keeps_nothing():
    drawn = DrawnScores(0)
    drawn.note("a", scores(1))
    assert not drawn.by_problem
    assert drawn.take() == {}
