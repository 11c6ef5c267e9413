"""The package's checks (`nemo_grpo.variants.checking`) hold for every variant, on steps of many shapes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import ALL, IDS, PARAMETERS, steps

from nemo_grpo import build_objective
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.checking import check_variant, invariance
from nemo_grpo.variants.small_steps import changed, example_step, loss_and_gradient

FEW = settings(max_examples=25, deadline=None)
every_variant = pytest.mark.parametrize(("name", "parameters"), ALL, ids=IDS)


@every_variant
@FEW
@given(batch=steps(), cuts=st.lists(st.integers(0, 16), max_size=4))
def test_loss_is_the_sum_over_any_microbatches(name, parameters, batch, cuts):
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(len(cuts)))
    bounds = sorted({min(c, len(order)) for c in cuts})
    parts = [part for part in torch.tensor_split(order, bounds) if len(part)]
    assert invariance.adds_up(build_objective(name, **parameters), batch, parts) is None


@every_variant
@FEW
@given(batch=steps())
def test_loss_does_not_depend_on_row_order_or_group_numbers(name, parameters, batch):
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(3))
    assert invariance.ignores_order(build_objective(name, **parameters), batch, order) is None


@every_variant
@FEW
@given(batch=steps(), left=st.integers(0, 3), right=st.integers(0, 3))
def test_loss_does_not_depend_on_padding(name, parameters, batch, left, right):
    assert invariance.ignores_padding(build_objective(name, **parameters), batch, left, right) is None


@every_variant
@FEW
@given(batch=steps())
def test_packing_gives_the_same_loss(name, parameters, batch):
    assert invariance.survives_packing(build_objective(name, **parameters), batch) is None


@every_variant
@FEW
@given(batch=steps(), garbage=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30]))
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(name, parameters, batch, garbage):
    assert invariance.ignores_what_is_masked(build_objective(name, **parameters), batch, garbage) is None


@every_variant
def test_metrics_of_parts_add_up_to_the_whole(name, parameters):
    assert invariance.metrics_add_up(build_objective(name, **parameters), example_step()) is None


@every_variant
def test_gradient_agrees_with_finite_differences(name, parameters):
    assert invariance.agrees_with_differences(build_objective(name, **parameters), example_step()) is None


@every_variant
def test_tensor_on_no_valid_token_gives_zero(name, parameters):
    assert invariance.is_zero_without_tokens(build_objective(name, **parameters), example_step()) is None


@every_variant
def test_loss_keeps_the_dtype(name, parameters):
    assert invariance.keeps_dtype(build_objective(name, **parameters), example_step()) is None


@every_variant
def test_every_check_of_the_command_holds(name, parameters):
    assert check_variant(parse_loss_fn({"variant": name, **parameters})) == []


def test_a_loss_of_whole_groups_is_checked_group_by_group():
    assert check_variant(parse_loss_fn({"variant": "cw_grpo", "author_compat": True})) == []


DRAWING = [("clip_cov", PARAMETERS["clip_cov"]), ("tr_grpo", {"weighting": "random"})]


@pytest.mark.parametrize(("name", "parameters"), DRAWING, ids=["clip_cov", "tr_grpo-random"])
def test_draws_keyed_by_response_ids_survive_rounding_and_row_order(name, parameters):
    batch = replace(example_step(), response_ids=torch.tensor([7, 2**62, -5, 11, 12]))
    o = build_objective(name, **parameters)
    _, gradient, _ = loss_and_gradient(o, batch)
    # another microbatch size, another layout
    noisy = replace(batch, prev_logprobs=batch.prev_logprobs + 1e-9)
    assert_same_draw = lambda g: torch.testing.assert_close(g, gradient, rtol=1e-6, atol=1e-7)  # noqa: E731
    assert_same_draw(loss_and_gradient(o, noisy)[1])
    order = torch.tensor([4, 2, 0, 3, 1])
    back = torch.empty_like(gradient)
    shuffled = changed(noisy.select(order, next_token_logprobs=noisy.next_token_logprobs[order]))
    back[order] = loss_and_gradient(o, shuffled)[1]
    assert_same_draw(back)
