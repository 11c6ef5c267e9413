"""GSPO and CISPO against TRL's formulas, written out here; values and gradients on the same tensors.

TRL's settings: GSPO ``importance_sampling_level=sequence, loss_type=grpo``; CISPO ``loss_type=cispo``, whose
``epsilon_high`` bounds the weight itself.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from steps import steps
from torch import Tensor

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.variants.small_steps import loss_and_gradient


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
