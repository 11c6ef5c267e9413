"""The loss and its gradient do not depend on how a step is laid out or split, for every variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import ALL, IDS, PARAMETERS, TOKEN_TENSORS, counts, loss_and_gradient, random_step, steps

from nemo_grpo import TokenBatch, build_objective

FEW = settings(max_examples=25, deadline=None)
every_variant = pytest.mark.parametrize(("name", "parameters"), ALL, ids=IDS)


def shuffle(batch: TokenBatch, order: torch.Tensor) -> TokenBatch:
    return batch.select(order, next_token_logprobs=batch.next_token_logprobs[order].detach().requires_grad_())


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@every_variant
@FEW
@given(batch=steps(), cuts=st.lists(st.integers(0, 16), max_size=4))
def test_loss_is_the_sum_over_any_microbatches(name, parameters, batch, cuts):
    o = build_objective(name, **parameters)
    whole, gradient, _ = loss_and_gradient(o, batch)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(len(cuts)))
    bounds = sorted({min(c, len(order)) for c in cuts})
    parts = [part for part in torch.tensor_split(order, bounds) if len(part)]
    split, split_gradient, _ = loss_and_gradient(o, batch, parts)
    assert_same(split, whole)
    assert_same(split_gradient, gradient)


@every_variant
@FEW
@given(batch=steps())
def test_loss_does_not_depend_on_row_order_or_group_numbers(name, parameters, batch):
    o = build_objective(name, **parameters)
    whole, gradient, _ = loss_and_gradient(o, batch)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(3))
    shuffled = shuffle(replace(batch, group_ids=100 - batch.group_ids), order)
    value, shuffled_gradient, _ = loss_and_gradient(o, shuffled)
    assert_same(value, whole)
    assert_same(shuffled_gradient, gradient[order])


@every_variant
@FEW
@given(batch=steps(), left=st.integers(0, 3), right=st.integers(0, 3))
def test_loss_does_not_depend_on_padding(name, parameters, batch, left, right):
    o = build_objective(name, **parameters)
    whole, gradient, _ = loss_and_gradient(o, batch)
    changes = {
        field: torch.nn.functional.pad(getattr(batch, field).detach(), (left, right), value=-7.0)
        for field in TOKEN_TENSORS
    }
    changes["token_mask"] = torch.nn.functional.pad(batch.token_mask, (left, right), value=False)
    changes["next_token_logprobs"].requires_grad_()
    value, padded_gradient, _ = loss_and_gradient(o, replace(batch, **changes))
    assert_same(value, whole)
    assert_same(padded_gradient[:, left : left + gradient.shape[1]], gradient)


@every_variant
@FEW
@given(batch=steps())
def test_packing_gives_the_same_loss(name, parameters, batch):
    """Packing wrappers call the loss once per sequence, cut to its true length, with global counts."""
    o = build_objective(name, **parameters)
    whole, gradient, _ = loss_and_gradient(o, batch)
    prepared = o.prepare(batch, seed=11)
    total, gradients = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient)
    for row, length in enumerate(batch.token_mask.sum(1).tolist()):
        current = batch.next_token_logprobs[row : row + 1, :length].detach().requires_grad_()
        part = prepared.select(torch.tensor([row]), next_token_logprobs=current, length=length)
        loss, _ = o.loss(part, **counts(batch))
        (gradients[row : row + 1, :length],) = torch.autograd.grad(loss, current)
        total = total + loss.detach()
    assert_same(total, whole)
    assert_same(gradients, gradient)


@every_variant
@FEW
@given(batch=steps(), garbage=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30]))
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(name, parameters, batch, garbage):
    o = build_objective(name, **parameters)
    whole, gradient, prepared = loss_and_gradient(o, batch)
    bad = replace(
        batch,
        **{f: torch.where(batch.mask, getattr(batch, f).detach(), garbage) for f in TOKEN_TENSORS},
        rewards=torch.where(batch.sample_mask, batch.rewards, garbage),
    )
    bad.next_token_logprobs.requires_grad_()
    value, bad_gradient, bad_prepared = loss_and_gradient(o, bad)
    assert torch.equal(value, whole)
    assert torch.equal(bad_gradient, gradient)
    assert (bad_gradient[~batch.mask] == 0).all()
    for metric, expected in prepared.metrics.items():
        assert torch.equal(bad_prepared.metrics[metric], expected), metric


@every_variant
def test_metrics_of_parts_add_up_to_the_whole(name, parameters):
    batch = steps_example()
    o = build_objective(name, **parameters)
    prepared = o.prepare(batch)
    whole = o.loss(prepared, **counts(batch))[1]
    parts = [o.loss(prepared.select(torch.tensor([i])), **counts(batch))[1] for i in range(5)]
    for metric, value in whole.items():
        assert_same(sum(part[metric] for part in parts), value)


@every_variant
def test_gradient_agrees_with_finite_differences(name, parameters):
    batch = steps_example()
    o = build_objective(name, **parameters)
    prepared = o.prepare(batch, seed=2)
    if name == "tr_grpo":  # its weight has no gradient by definition: freeze it for the comparison
        o = build_objective(name, **parameters | {"weighting": "equal"})
    if name == "cispo":
        return

    def loss(current: torch.Tensor) -> torch.Tensor:
        part = prepared.select(slice(None), next_token_logprobs=current)
        return o.loss(part, **counts(batch))[0]

    assert torch.autograd.gradcheck(loss, (batch.next_token_logprobs.detach().requires_grad_(),), atol=1e-8)


@every_variant
def test_tensor_on_no_valid_token_gives_zero(name, parameters):
    batch = replace(steps_example(), token_mask=torch.zeros(5, 4))
    loss, gradient, _ = loss_and_gradient(build_objective(name, **parameters), batch)
    assert loss == 0
    assert (gradient == 0).all()


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_keeps_the_dtype(name, parameters, dtype):
    batch = steps_example()
    changes = {f: getattr(batch, f).detach().to(dtype) for f in TOKEN_TENSORS}
    changes["next_token_logprobs"].requires_grad_()
    value, gradient, prepared = loss_and_gradient(
        build_objective(name, **parameters), replace(batch, **changes)
    )
    exact, _, _ = loss_and_gradient(build_objective(name, **parameters), batch)
    assert prepared.advantages.dtype == gradient.dtype == dtype
    if name == "clip_cov" or parameters.get("weighting") == "random":
        return  # their draws are keyed by the bits of the logprobs, which rounding changes
    torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=1e-6)


def steps_example() -> TokenBatch:
    """Two groups; an empty, a one-token and a truncated response among them."""
    return random_step([4, 1, 0, 3, 4], [1.0, 0.0, 0.0, 1.0, 0.3], [0, 0, 0, 1, 1], seed=5)


DRAWING = [("clip_cov", PARAMETERS["clip_cov"]), ("tr_grpo", {"weighting": "random"})]


@pytest.mark.parametrize(("name", "parameters"), DRAWING, ids=["clip_cov", "tr_grpo-random"])
def test_draws_keyed_by_response_ids_survive_rounding_and_row_order(name, parameters):
    batch = replace(steps_example(), response_ids=torch.tensor([7, 2**62, -5, 11, 12]))
    o = build_objective(name, **parameters)
    _, gradient, _ = loss_and_gradient(o, batch)
    # another microbatch size, another layout
    noisy = replace(batch, prev_logprobs=batch.prev_logprobs + 1e-9)
    assert_same_draw = lambda g: torch.testing.assert_close(g, gradient, rtol=1e-6, atol=1e-7)  # noqa: E731
    assert_same_draw(loss_and_gradient(o, noisy)[1])
    order = torch.tensor([4, 2, 0, 3, 1])
    back = torch.empty_like(gradient)
    back[order] = loss_and_gradient(o, shuffle(noisy, order))[1]
    assert_same_draw(back)
