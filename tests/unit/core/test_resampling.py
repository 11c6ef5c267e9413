"""Which groups make a step."""

from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_grpo.core.resampling import accumulate_groups, has_signal, rewards_differ


def step(*batches: str, num_groups: int = 5, threshold: float = 0.6, max_draws: int = 20):
    """(groups of the step, number of draws); groups are letters, upper case carries signal."""
    draws = iter(batches)
    gathered = accumulate_groups(
        lambda: next(draws),
        str.isupper,
        num_groups=num_groups,
        valid_fraction_threshold=threshold,
        max_draws=max_draws,
    )
    return "".join(gathered.take(num_groups)), gathered.draws


@pytest.mark.parametrize(
    ("batches", "options", "expected"),
    [
        # 3 of 5 = 0.6 is enough at once; filled up with invalid ones, valid first
        (["AbCDe"], {}, ("ACDbe", 1)),
        # valid groups accumulate; filled up from the last draw only
        (["Abcde", "fGhij", "KLmno"], {}, ("AGKLm", 3)),
        # more than needed are cut
        (["Abcde", "FGHIJ"], {}, ("AFGHI", 2)),
        # DAPO's dynamic sampling
        (["AbCde", "FGhij", "KLMNO"], {"threshold": 1.0}, ("ACFGK", 3)),
        (["abcde", "fGhij"], {"max_draws": 2}, ("Gfhij", 2)),
        (["aBcde"], {"threshold": 0.0}, ("Bacde", 1)),
        (["abcde"], {"threshold": 0.0}, ("abcde", 1)),
        # nothing valid still fills the step
        (["abcde"], {"max_draws": 1}, ("abcde", 1)),
    ],
)
def test_groups_of_a_step_by_hand(batches, options, expected):
    assert step(*batches, **options) == expected


@given(
    batches=st.lists(st.text("aA", min_size=4, max_size=4), min_size=6, max_size=6),
    threshold=st.floats(0.0, 1.0),
)
def test_step_is_full_and_meets_the_threshold_unless_draws_run_out(batches, threshold):
    taken, used = step(*batches, num_groups=4, threshold=threshold, max_draws=6)
    assert len(taken) == 4
    assert used == 6 or sum(map(str.isupper, taken)) >= threshold * 4
    assert taken == "".join(sorted(taken, key=str.islower))  # valid first


def test_signal_is_max_differs_from_min():
    """A std would call the float noise of sixteen rewards of 0.3 a signal."""
    assert all(map(rewards_differ, ([1.0, 0.0], [0.1 + 0.2, 0.3], [nan, 1.0, 0.0])))
    assert not any(map(rewards_differ, ([0.3] * 16, [0.7] * 8, [1.0], [nan, 1.0, 1.0], [nan], [])))


@pytest.mark.parametrize(
    ("rewards", "trains", "expected"),
    [
        ([1.0, 0.0], [True, True], True),
        ([1.0, 0.0], [False, True], True),  # what is left out still counts with its reward
        ([1.0, 0.0], [False, False], False),
        ([0.3, 0.3], [True, True], False),
        ([nan, 1.0, 0.0], [True, False, False], False),  # the one that trains has no reward
        ([nan, nan], [True, True], False),
    ],
)
def test_a_group_has_signal_if_rewards_differ_and_a_rewarded_response_trains(rewards, trains, expected):
    assert has_signal(rewards, trains) == expected
