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

every_variant = pytest.mark.parametrize(("name", "parameters"), ALL, ids=IDS)


@every_variant
@settings(max_examples=25, deadline=None)
@given(
    batch=steps(),
    cuts=st.lists(st.integers(0, 16), max_size=4),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    garbage=st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30]),
)
def test_loss_depends_on_no_layout_of_the_step(name, parameters, batch, cuts, padding, garbage):
    objective, num_rows = build_objective(name, **parameters), len(batch.rewards)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(len(cuts)))
    bounds = sorted({min(c, num_rows) for c in cuts})
    parts = [part for part in torch.tensor_split(order, bounds) if len(part)]
    assert invariance.adds_up(objective, batch, parts) is None
    assert invariance.ignores_order(objective, batch, order) is None
    assert invariance.ignores_padding(objective, batch, *padding) is None
    assert invariance.survives_packing(objective, batch) is None
    assert invariance.ignores_what_is_masked(objective, batch, garbage) is None


@every_variant
def test_a_response_without_a_reward_changes_nothing_for_the_others(name, parameters):
    """EQUATIONS.md on the smaller group: the step is the one in which it was not drawn."""
    objective, whole = build_objective(name, **parameters), example_step()
    given = torch.tensor([True, False, True, True, True])
    rewards = torch.where(given, whole.rewards, float("nan"))
    ids = torch.tensor([7, 8, 9, 11, 12])  # a random draw goes by the response
    with_it = changed(whole, rewards=rewards, sample_mask=given, rewarded=given, response_ids=ids)
    rows = given.nonzero()[:, 0]
    without = changed(with_it.select(rows, next_token_logprobs=with_it.next_token_logprobs[rows]))
    loss, gradient, _ = loss_and_gradient(objective, with_it)
    expected, of_others, _ = loss_and_gradient(objective, without)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[rows], of_others)
    assert not gradient[1].any()


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@every_variant
def test_every_check_of_the_command_holds(name, parameters, quick):
    assert check_variant(parse_loss_fn({"variant": name, **parameters}), quick=quick) == []


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
