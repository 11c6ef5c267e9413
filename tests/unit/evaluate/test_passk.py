"""Estimators against enumeration and numbers worked out by hand."""

from itertools import combinations, product

import pytest

from nemo_grpo.evaluate import majority_at_k, mean_and_stderr, pass_at_k
from nemo_grpo.evaluate.passk import MOST_COMPARISONS, MOST_UNDECIDED, Majority, stderr_of_runs
from nemo_grpo.evaluate.runner import ks


def test_pass_at_k_by_hand():
    for num_correct, k in product(range(7), range(1, 7)):  # the share of subsets with a correct sample
        subsets = list(combinations([True] * num_correct + [False] * (6 - num_correct), k))
        assert pass_at_k(6, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    # n = 8, c = 2, k = 4: 1 - C(6,4) / C(8,4) = 1 - 15/70
    assert pass_at_k(8, 2, 4) == pytest.approx(55 / 70)
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["a", "b", "b"], [1.0, 0.0, 0.0], 0.0),
        (["b", "a", "a", "b"], [1.0, 0.0, 0.0, 1.0], 1.0),
        (["a", "b", "a", "b"], [0.0, 1.0, 0.0, 1.0], 0.0),
        ([None, None, "a"], [0.0, 0.0, 1.0], 1.0),
        ([None, None], [0.0, 0.0], 0.0),
    ],
)
def test_majority_at_k(answers, scores, expected):
    assert majority_at_k(answers, scores) == Majority(expected)


def test_majority_counts_equal_answers_together():
    def same(one, other):
        return {one, other} <= {"1/2", "0.5", "50%"} or one == other

    # 2 votes for "3", 3 for a half in three spellings; its first spelling stands at index 1
    answers, scores = ["3", "0.5", "3", "1/2", "50%"], [0.0, 1.0, 0.0, 1.0, 1.0]
    assert majority_at_k(answers, scores) == Majority(0.0)
    assert majority_at_k(answers, scores, same) == Majority(1.0)


def test_a_vote_asks_a_limited_number_of_times():
    asked = []
    answers = [f"x+{i}" for i in range(100)]  # 4950 pairs
    majority = majority_at_k(answers, [1.0] + 99 * [0.0], lambda *pair: asked.append(pair) or False)
    assert majority == Majority(1.0, cut_short=True)
    assert len(asked) == len(set(asked)) == MOST_COMPARISONS
    asked.clear()
    assert majority_at_k(answers, 100 * [0.0], lambda *pair: asked.append(pair)).cut_short
    assert len(asked) == MOST_UNDECIDED  # without a verdict
    # 16 answers, the usual k, are all compared
    asked.clear()
    assert not majority_at_k(answers[:16], 16 * [0.0], lambda *pair: asked.append(pair) or False).cut_short
    assert len(asked) == 120


def test_hopeless_answers_are_not_compared_and_the_others_decide_the_vote():
    asked = []

    def same(one, other):
        asked.append((one, other))
        return {one, other} == {"1/2", "0.5"}

    answers = ["9^9", "8^8", "7^7", "1/2", "0.5", "9^9"]
    scores = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert majority_at_k(answers, scores, same, {"9^9", "8^8", "7^7"}) == Majority(0.0, cut_short=True)
    assert majority_at_k(answers[:5], scores, same, {"9^9", "8^8", "7^7"}) == Majority(1.0, cut_short=True)
    assert set(asked) == {("1/2", "0.5")}


def test_comparisons_that_cost_nothing_do_not_cut_a_vote_short():
    assert majority_at_k([f"a{i}" for i in range(32)], 32 * [0.0]) == Majority(0.0)
    # 231 pairs of integers, then 3 and 3 votes for a half against 4 for 7
    answers = [*map(str, range(100, 122)), *3 * ["1/2"], *3 * ["0.5"], *4 * ["7"]]
    scores = 22 * [0.0] + 6 * [1.0] + 4 * [0.0]
    majority = majority_at_k(answers, scores, lambda one, other: {one, other} == {"1/2", "0.5"})
    assert majority == Majority(1.0)


def test_stderr_of_runs_by_hand():
    # problem 1: scores 1, 0, variance 1/2, over 2 samples 1/4; problem 2: none; sqrt(1/4) / 2
    assert stderr_of_runs([[1, 0], [1, 1]]) == pytest.approx(0.25)
    assert stderr_of_runs([[1], [0]]) == 0.0


def test_mean_and_stderr_by_hand():
    # values 0, 0, 1, 1: mean 1/2, variance (4 x 1/4) / 3 = 1/3, error sqrt(1/3 / 4)
    assert mean_and_stderr([0, 0, 1, 1]) == (0.5, pytest.approx((1 / 12) ** 0.5))
    assert mean_and_stderr([0.3]) == (0.3, 0.0)


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_ks_are_powers_of_two_and_the_number_of_samples(num_samples, expected):
    assert ks(num_samples) == expected
