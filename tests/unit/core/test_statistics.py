"""Statistics over groups and steps against numbers worked out one by one."""

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch

from nemo_grpo.core.statistics import Groups, group_zscore, percentiles, row_std, segment_zscore

X = torch.tensor([[1.0, 4.0, math.nan], [7.0, 0.5, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, True], [True, True, True]])


def test_group_zscore_standardises_the_tokens_of_all_the_groups_rows():
    groups = Groups.from_ids(torch.tensor([5, 5, 9]))
    tokens = [1.0, 4.0, 7.0, 3.0]
    z = [(value - fmean(tokens)) / (pstdev(tokens) + 0.1) for value in tokens]
    expected = [[z[0], z[1], 0], [z[2], 0, z[3]], [0, 0, 0]]  # the second group has no spread
    found = group_zscore(X, MASK, groups, 0.1)
    assert found.tolist() == [pytest.approx(row, abs=1e-12) for row in expected]
    segments = groups.index[:, None].expand_as(X)
    assert torch.allclose(found, segment_zscore(X, MASK, segments, 2, 0.1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rewards", [[1.0, 4.0], [1.0, 4.0, 2.5]])
def test_std_of_rewards_is_the_sample_standard_deviation(rewards):
    rows, valid = torch.tensor([*rewards, math.nan]), torch.tensor([*[True] * len(rewards), False])
    assert row_std(rows, valid).item() == pytest.approx(stdev(rewards))


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_rewards_have_no_spread(number):
    assert row_std(torch.tensor([3.0, 5.0]), torch.arange(2) < number) == 0


@pytest.mark.parametrize("number", [1, 2, 5, 1000])
def test_percentiles_are_elements_of_the_sorted_values(number):
    values = torch.randn(number, generator=torch.Generator().manual_seed(0))
    kept, ordered = values.clone(), sorted(values.tolist())
    shares = (0.0, 0.0001, 0.2, 0.5, 0.9999, 1.0)
    found = [float(value) for value in percentiles(values, shares)]
    assert found == [ordered[round(share * (number - 1))] for share in shares]
    assert torch.equal(values, kept)


def test_percentiles_of_nothing_are_zero():
    assert [float(value) for value in percentiles(torch.empty(0), (0.1, 0.9))] == [0.0, 0.0]
