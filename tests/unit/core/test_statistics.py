"""Statistics over groups and steps against numbers worked out one by one."""

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch

from nemo_grpo.core.statistics import (
    Groups,
    group_zscore,
    moving_moments,
    percentiles,
    row_centred,
    row_std,
    segment_zscore,
    token_centred,
    token_std,
)
from nemo_grpo.core.token_weights import gaussian_kernel_weights, group_covariance, step_covariance
from nemo_grpo.variants.checking.small_steps import random_step

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


@pytest.mark.parametrize("rewards", [[], [3.0], [1.0, 4.0], [1.0, 4.0, 2.5]])
def test_std_of_rewards_is_the_sample_standard_deviation(rewards):
    rows, valid = torch.tensor([*rewards, math.nan]), torch.tensor([*[True] * len(rewards), False])
    assert row_std(rows, valid).item() == pytest.approx(stdev(rewards) if len(rewards) > 1 else 0.0)


@pytest.mark.parametrize("number", [0, 1, 2, 5, 1000])
def test_percentiles_are_elements_of_the_sorted_values(number):
    values = torch.randn(number, generator=torch.Generator().manual_seed(0))
    kept, ordered = values.clone(), sorted(values.tolist())
    shares = (0.0, 0.0001, 0.2, 0.5, 0.9999, 1.0)
    found = [float(value) for value in percentiles(values, shares)]
    assert found == [ordered[round(share * (number - 1))] if ordered else 0.0 for share in shares]
    assert torch.equal(values, kept)


OFFSETS = [0.0, 1e4, -1e4]
GROUPS = Groups.from_ids(torch.tensor([5, 5, 9, 9]))
WHOLE = torch.ones(4, 3, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, -0.3, 1e4 + 0.1, -1e4 / 3])
def test_equal_values_have_no_spread_at_any_magnitude(value, dtype):
    x = torch.full((4, 3), value, dtype=dtype)
    assert not row_centred(x, WHOLE).any()
    assert not token_centred(x, WHOLE).any()
    assert not GROUPS.centred(x[:, 0], WHOLE[:, 0]).any()
    assert row_std(x[:, 0], WHOLE[:, 0]) == token_std(x, WHOLE) == 0
    assert not group_zscore(x, WHOLE, GROUPS, 0.0).any()
    assert not segment_zscore(x, WHOLE, GROUPS.index[:, None].expand_as(x), 2, 0.0).any()
    assert moving_moments(x, WHOLE, {}, 0.99) == pytest.approx(
        {"mean": float(x[0, 0]), "variance": 0.0}, rel=1e-15, abs=0
    )


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("others", [[0.25] * 11, [0.25 + 2**-9 * k for k in range(11)]])
def test_an_offset_changes_no_statistic_of_one_outlier(others, offset):
    plain = torch.tensor([-40.0, *others], dtype=torch.float64).reshape(4, 3)  # exact at every offset
    x, segments = plain + offset, GROUPS.index[:, None].expand_as(plain)
    rows, valid = plain[:, 0], WHOLE[:, 0]
    z = lambda y: (y - y.mean()) / (y.std(correction=0) + 1e-4)  # noqa: E731
    expected = torch.cat([z(plain[:2]), z(plain[2:])])
    for found in (group_zscore(x, WHOLE, GROUPS, 1e-4), segment_zscore(x, WHOLE, segments, 2, 1e-4)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert row_std(x[:, 0], valid).item() == pytest.approx(stdev(rows.tolist()), rel=1e-12)
    assert token_std(x, WHOLE).item() == pytest.approx(pstdev(plain.flatten().tolist()), rel=1e-12)
    assert GROUPS.std(x[:, 0], valid).tolist() == pytest.approx(
        [stdev(rows[:2].tolist()), stdev(rows[2:].tolist())], rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_moving_statistics_are_those_of_all_weighted_tokens_at_any_offset(offset):
    """Mean square minus squared mean, in exact arithmetic of the values without the offset."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(4, 3, generator=generator).double() / 2**step for step in range(4)]
    steps[2][0, 0] = 30.0
    moving, mean, square = dict[str, float](), None, None
    for x in steps:
        moving = moving_moments(x + offset, WHOLE, moving, 0.75)
        now = x.mean().item(), x.square().mean().item()
        mean, square = now if mean is None else (0.75 * mean + 0.25 * now[0], 0.75 * square + 0.25 * now[1])
    assert moving["mean"] == pytest.approx(mean + offset, rel=1e-14)
    assert moving["variance"] == pytest.approx(square - mean**2, rel=1e-9)


@pytest.mark.parametrize("value", [-0.1, -0.3, -1e4 / 3])
@pytest.mark.parametrize("centring", ["response", "group"])
def test_equal_logprobs_give_no_covariance_and_weight_1(value, centring):
    """A rounded mean would leave covariances of 1e-17, and a kernel as narrow would find outliers in them."""
    batch = random_step([3, 3, 3], [1.0, 0.0, 0.3], [0, 0, 0])
    logprobs = torch.full_like(batch.prev_logprobs, value)
    groups, a = Groups.from_ids(batch.group_ids), torch.tensor([1.1, -0.9, -0.2], dtype=torch.float64)
    covariance = group_covariance(logprobs, a, batch, groups, centring)
    assert not covariance.any()
    assert not step_covariance(logprobs, a[:, None].expand_as(logprobs), batch.mask).any()
    for scope in ("group", "batch"):
        assert (gaussian_kernel_weights(covariance, batch.mask, groups, scope) == 1).all()
