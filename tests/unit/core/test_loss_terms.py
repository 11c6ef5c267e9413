"""Clip and KL: values and derivatives, against numbers by hand and differences."""

import pytest
import torch

from nemo_grpo import TokenBatch, build_objective, global_counts
from nemo_grpo.core.kl import kl_estimate, weighted_k3
from nemo_grpo.core.surrogates import (
    MAX_LOG_RATIO,
    clipped_policy_gradient,
    importance_ratio,
    sequence_importance_ratio,
)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_clip_tells_the_tokens_without_gradient():
    ratio = row(1.5, 1.5, 0.5, 0.5, 1.0, 5.0).requires_grad_()
    advantages = row(2, -2, 2, -2, 2, -2)
    value, is_clipped = clipped_policy_gradient(ratio, advantages, 0.2, 0.2, 3.0)
    (gradient,) = torch.autograd.grad(value.sum(), ratio)
    torch.testing.assert_close(value.detach(), row(2.4, -3, 1, -1.6, 2, -6))
    assert is_clipped.tolist() == [[1, 0, 0, 1, 0, 1]]
    torch.testing.assert_close(gradient, row(0, -2, 2, 0, 2, 0))
    assert not is_clipped.requires_grad


def test_k3_is_accurate_where_the_policies_are_close():
    distance = torch.tensor([[1e-4, -1e-4]], dtype=torch.float32)  # k3 = d^2 / 2 + d^3 / 6 + ...
    kl = kl_estimate(-distance, torch.zeros_like(distance), "k3")
    torch.testing.assert_close(kl, torch.full_like(kl, 5e-9), rtol=2e-3, atol=0)


def test_ratio_and_kl_are_unchanged_below_the_clamp_and_finite_beyond():
    gaps = torch.linspace(-MAX_LOG_RATIO, MAX_LOG_RATIO, 41)[None]
    zero = torch.zeros_like(gaps)
    assert torch.equal(importance_ratio(gaps, zero), gaps.exp())
    assert torch.equal(kl_estimate(-gaps, zero, "k3"), torch.expm1(gaps) - gaps)
    mean = sequence_importance_ratio(gaps[:, 1:], zero[:, 1:], torch.ones(1, 40, dtype=torch.bool))
    assert torch.equal(mean, gaps[:, 1:].mean(1, keepdim=True).exp().expand(1, 40))
    far = torch.tensor([[100.0, -100.0, 90.0]], requires_grad=True)
    for value in (
        importance_ratio(far, torch.zeros(1, 3)),
        sequence_importance_ratio(far[:, :1], torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)),
        kl_estimate(-far, torch.zeros(1, 3), "k3"),
        weighted_k3(-far, torch.zeros(1, 3), torch.ones(1, 3)),
    ):
        (gradient,) = torch.autograd.grad(value.sum(), far)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0
    assert kl_estimate(-far, torch.zeros(1, 3), "k3")[0, 1].item() == pytest.approx(99.0)  # as without clamp


def test_share_of_clamped_tokens_is_logged():
    """The policy moved by 100, -100, 1, 0 and 0 nats, and is 100 below the reference in the first alone."""
    current = row(-1.0, -101.0, -1.0, -1.0, -1.0)
    batch = TokenBatch(
        prev_logprobs=row(-101.0, -1.0, -2.0, -1.0, -1.0),
        reference_policy_logprobs=row(99.0, -101.0, -2.0, -1.0, -1.0),
        token_mask=torch.ones(1, 5),
        sample_mask=torch.ones(1),
        rewards=torch.ones(1),
        group_ids=torch.zeros(1, dtype=torch.int64),
    )
    objective = build_objective("grpo", reference_policy_kl_penalty=0.1)
    part = objective.prepare(batch).select(slice(None), next_token_logprobs=current)
    toks, seqs = global_counts(batch)
    _, metrics = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
    assert metrics["ratio/clamped_fraction"].item() == pytest.approx(2 / 5)
    assert metrics["kl/clamped_fraction"].item() == pytest.approx(1 / 5)
