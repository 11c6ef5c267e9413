"""Losses against the formulas of their authors' code, written out here; values and gradients."""

import pytest
import torch
from hypothesis import assume, given, settings
from steps import steps
from torch import Tensor

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.variants.checking.small_steps import loss_and_gradient


def only_counting_rows(batch: TokenBatch) -> TokenBatch:
    leaf = batch.next_token_logprobs[batch.sample_mask].detach().requires_grad_()
    return batch.select(batch.sample_mask, next_token_logprobs=leaf)


def mean_of_tokens(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1)


def by_group(batch: TokenBatch, of_group) -> Tensor:
    """[B]: what ``of_group`` makes of each group's rewards."""
    values = torch.zeros_like(batch.rewards)
    for number in batch.group_ids.unique():
        rows = batch.group_ids == number
        values[rows] = of_group(batch.rewards[rows])
    return values


def maxrl(batch: TokenBatch) -> Tensor:
    """Follow tajwarfahim/maxrl, ``compute_maxrl_outcome_advantage``, with verl's clipped loss."""

    def advantage(rewards: Tensor) -> Tensor:
        if len(rewards) == 1:
            return torch.zeros_like(rewards)  # the deviation: there rewards / eps
        return (rewards - rewards.mean()) / (rewards.mean() + 1e-6)

    a = by_group(batch, advantage)[:, None]
    ratio = (batch.next_token_logprobs - batch.prev_logprobs).exp()
    clipped = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return mean_of_tokens(clipped, batch.token_mask.double())


def dppo(batch: TokenBatch, threshold: float, bound: float) -> Tensor:
    """Follow sail-sg/Stable-RL, ``compute_policy_loss_with_mask`` in its mode ``dppo_binary_tv``."""
    a = by_group(batch, lambda rewards: rewards - rewards.mean())[:, None]
    logprobs, sampled = batch.next_token_logprobs, batch.generation_logprobs
    weight = (logprobs - sampled).clamp(max=20).exp().clamp(max=bound).detach()
    moved = (logprobs.exp() - sampled.exp()).detach()
    is_invalid = torch.where(a > 0, moved > threshold, moved < -threshold)
    return mean_of_tokens(-a * weight * (1 - is_invalid.double()) * logprobs, batch.token_mask.double())


def prime_rl_gradient_of_dppo(batch: TokenBatch) -> Tensor:
    """Follow prime-rl's ``default_loss_fn``, thresholds 0.2, without its squared log-ratio."""
    a = by_group(batch, lambda rewards: rewards - rewards.mean())[:, None]
    logprobs, sampled = batch.next_token_logprobs, batch.generation_logprobs
    moved = (logprobs.exp() - sampled.exp()).detach()
    drops = torch.where(a > 0, moved > 0.2, moved < -0.2)
    return mean_of_tokens(-(~drops * a * (logprobs - sampled).exp()), batch.token_mask.double())


def sapo(batch: TokenBatch, tau_pos: float, tau_neg: float) -> Tensor:
    """Follow verl's ``compute_policy_loss_sapo``: gated by token, averaged by response."""

    def advantage(rewards: Tensor) -> Tensor:
        if len(rewards) == 1 or rewards.max() == rewards.min():
            return torch.zeros_like(rewards)  # verl divides rounding by eps
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    a = by_group(batch, advantage)[:, None]
    ratio = (batch.next_token_logprobs - batch.prev_logprobs).clamp(-20, 20).exp()
    tau = torch.where(a > 0, tau_pos, tau_neg)
    terms = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    mask = batch.token_mask.double()
    return ((terms * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


CASES = [
    ("sapo", {}, lambda batch: sapo(batch, 1.0, 1.05)),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 7.0}, lambda batch: sapo(batch, 3.0, 7.0)),
    ("maxrl", {}, maxrl),
    ("dppo", {}, lambda batch: dppo(batch, 0.2, 5.0)),
    ("dppo", {"divergence_threshold": 0.05, "ratio_max": 1.1}, lambda batch: dppo(batch, 0.05, 1.1)),
]


@pytest.mark.parametrize(("name", "parameters", "released"), CASES)
@settings(max_examples=40, deadline=None)
@given(batch=steps())
def test_loss_and_gradient_equal_the_released_code(name, parameters, released, batch):
    batch = only_counting_rows(batch)
    assume(batch.token_mask.any())
    value, gradient, _ = loss_and_gradient(build_objective(name, **parameters), batch)
    expected = released(batch)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected, batch.next_token_logprobs)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(batch=steps())
def test_dppos_gradient_is_that_of_prime_rl(batch):
    batch = only_counting_rows(batch)
    assume(batch.token_mask.any())
    _, gradient, _ = loss_and_gradient(build_objective("dppo", ratio_max=None), batch)
    (expected,) = torch.autograd.grad(prime_rl_gradient_of_dppo(batch), batch.next_token_logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
