"""Intervals of predictions, from the errors of steps that are known."""

import random

import pytest

from benchmarks.plan_vs_published import COVERAGE, seen_of


def test_interval_of_few_steps_reaches_from_the_least_to_the_largest_ratio() -> None:
    found = seen_of("steps", {"a": [0.8, 1.25], "b": [1.0, 2.0]})
    assert (found.low, found.high, found.num_steps) == (0.8, 2.0, 4)
    # without a the ends are 1 and 2, and hold 1.25; without b 0.8 and 1.25, and hold 1
    assert found.covered == 0.5
    # predicted / seen - 1: 0.25, -0.2, 0, -0.5
    assert (found.median, found.worst) == (pytest.approx(0.225), 0.5)
    assert found.around(100) == (80, 200)


def test_interval_is_the_narrowest_that_other_models_steps_bear_out() -> None:
    """Twenty models of one step each, 1.00 to 1.19: outermost steps are left out until 80 % remain."""
    found = seen_of("steps", {str(n): [1 + n / 100] for n in range(20)})
    # the second of the other 19 from either end holds 16 of 20; the third 14
    assert (found.low, found.high) == (1.01, 1.18)
    assert found.covered == COVERAGE


@pytest.mark.parametrize("seed", range(3))
def test_interval_holds_what_it_states_of_new_models(seed: int) -> None:
    """Models whose errors have a part in common: of a model that was left out, the stated share is held."""
    draw = random.Random(seed)

    def model() -> list[float]:
        shift = draw.gauss(0, 0.15)
        return [2 ** (shift + draw.gauss(0, 0.1)) for _ in range(2)]

    known = seen_of("steps", {str(n): model() for n in range(200)})
    new = [ratio for _ in range(500) for ratio in model()]
    held = sum(known.low <= ratio <= known.high for ratio in new) / len(new)
    assert held == pytest.approx(known.covered, abs=0.05)
