"""GSPO and CISPO against TRL's formulas, written out here; values and gradients on the same tensors.

TRL's settings: GSPO ``importance_sampling_level=sequence, loss_type=grpo``; CISPO ``loss_type=cispo``, whose
``epsilon_high`` bounds the weight itself.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from steps import steps
from torch import Tensor

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.variants.checking.small_steps import TOKEN_TENSORS, counts, loss_and_gradient, random_step


def trl_gspo(logprobs: Tensor, old: Tensor, mask: Tensor, a: Tensor, epsilon: float, high: float) -> Tensor:
    weight = (((logprobs - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).exp()[:, None]
    terms = -torch.min(weight * a[:, None], weight.clamp(1 - epsilon, 1 + high) * a[:, None])
    return ((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def trl_cispo(logprobs: Tensor, old: Tensor, mask: Tensor, a: Tensor, epsilon_high: float) -> Tensor:
    weight = (logprobs - old).exp().clamp(max=epsilon_high).detach()
    return (-weight * a[:, None] * logprobs * mask).sum() / mask.sum().clamp(min=1.0)


CASES = [
    ("gspo", {}, lambda *x: trl_gspo(*x, 3e-4, 4e-4)),
    ("gspo", {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1}, lambda *x: trl_gspo(*x, 0.05, 0.1)),
    ("cispo", {"ratio_clip_max": 4.0}, lambda *x: trl_cispo(*x, 5.0)),
    ("cispo", {"ratio_clip_max": 0.1}, lambda *x: trl_cispo(*x, 1.1)),
]


@pytest.mark.parametrize(("name", "parameters", "trl"), CASES)
@settings(max_examples=40, deadline=None)
@given(batch=steps())
def test_loss_and_gradient_equal_trl(name, parameters, trl, batch):
    batch = batch.select(batch.sample_mask, next_token_logprobs=_leaf(batch))
    assume(batch.token_mask.any())
    value, gradient, prepared = loss_and_gradient(build_objective(name, **parameters), batch)
    theirs = trl(
        batch.next_token_logprobs,
        batch.prev_logprobs,
        batch.token_mask.double(),
        prepared.advantages.sum(1) / batch.token_mask.sum(1).clamp(min=1),
    )
    torch.testing.assert_close(value, theirs.detach(), rtol=1e-9, atol=1e-12)
    (expected,) = torch.autograd.grad(theirs, batch.next_token_logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def _leaf(batch: TokenBatch) -> Tensor:
    return batch.next_token_logprobs[batch.sample_mask].detach().requires_grad_()


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
