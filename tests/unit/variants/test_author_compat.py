"""CW-GRPO's released code, as an option: gradient through the weight, padded normaliser, whole groups."""

from dataclasses import replace

import pytest
import torch

from nemo_grpo import build_objective
from nemo_grpo.variants.small_steps import TOKEN_TENSORS, counts, random_step


def released_code(batch):
    """In its own terms: masked means per response, population std, w * numel / sum w, no detach."""
    mask, lp = batch.mask.double(), batch.next_token_logprobs
    a = batch.rewards - batch.rewards.mean()
    a = a / (batch.rewards.std() + 1e-4)
    mean = (lp * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    cov = (lp - mean) * (a - a.mean())[:, None] * mask
    sigma = cov[batch.mask].std(unbiased=False) + 1e-8
    w = torch.exp(-(cov**2) / (2 * sigma**2)) * mask
    w = w * mask.numel() / w.sum()
    d = batch.reference_policy_logprobs - lp
    term = torch.exp(lp - batch.prev_logprobs) * w * a[:, None] - 0.04 * (torch.exp(d) - d - 1)
    return -((term * mask).sum(1) / mask.sum(1)).mean()


@pytest.fixture
def group():
    return random_step([5, 2, 4, 5], [1.0, 0.0, 0.0, 1.0], [0] * 4, seed=3)


def test_loss_and_gradient_equal_the_released_code(group):
    o = build_objective("cw_grpo", author_compat=True)
    ours, _ = o.loss(o.prepare(group), **counts(group))
    expected = released_code(group)
    assert ours.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(ours, group.next_token_logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, group.next_token_logprobs)
    torch.testing.assert_close(gradient, expected_gradient)


def test_the_normaliser_counts_the_padding_of_the_group(group):
    """Lengths 5, 2, 4, 5: the weights' mean over 16 tokens is 20 / 16, whatever else pads the tensors."""
    o = build_objective("cw_grpo", author_compat=True)
    wide = {
        name: torch.nn.functional.pad(getattr(group, name).detach().double(), (3, 2))
        for name in (*TOKEN_TENSORS, "token_mask")
    }
    for batch in (group, replace(group, **wide)):
        loss, metrics = o.loss(o.prepare(batch), **counts(group))
        assert metrics["cw_grpo/weight_mean"].item() == pytest.approx(20 / 16)
        assert loss.item() == pytest.approx(released_code(group).item())


def test_anything_but_one_whole_group_is_refused(group):
    o = build_objective("cw_grpo", author_compat=True)
    prepared = o.prepare(group)
    with pytest.raises(ValueError, match="exactly one whole group"):
        o.loss(prepared.select(torch.tensor([0, 1])), global_valid_toks=16, global_valid_seqs=4)
    two = o.prepare(replace(group, group_ids=torch.tensor([0, 0, 1, 1])))
    with pytest.raises(ValueError, match="2 group"):
        o.loss(two, global_valid_toks=16, global_valid_seqs=4)


def test_a_group_of_which_nothing_trains_adds_nothing(group):
    o = build_objective("cw_grpo", author_compat=True)
    prepared = o.prepare(replace(group, sample_mask=torch.zeros(4, dtype=torch.bool)))
    loss, metrics = o.loss(prepared, global_valid_toks=9, global_valid_seqs=3)  # of other groups
    (gradient,) = torch.autograd.grad(loss, group.next_token_logprobs)
    assert loss.item() == 0
    assert not gradient.any()
    assert all(torch.isfinite(value) for value in metrics.values())
