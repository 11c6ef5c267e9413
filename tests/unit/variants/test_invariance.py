"""The package's checks (`nemo_grpo.variants.checking`) hold for every variant, on steps of many shapes."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import ALL, IDS, PARAMETERS, steps

from nemo_grpo import build_objective
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.checking import check_variant, invariance
from nemo_grpo.variants.checking.small_steps import (
    SEED,
    changed,
    counts,
    example_step,
    loss_and_gradient,
    random_step,
)
from nemo_grpo.variants.grpo import GRPO

every_variant = pytest.mark.parametrize(("name", "parameters"), ALL, ids=IDS)


@every_variant
@settings(max_examples=10, deadline=None)
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


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "tr_grpo", "gpg", "gspo", "cispo", "maxrl", "sapo"]
)
def test_on_policy_loss_and_gradient_are_those_of_equal_prev_logprobs(name):
    built = build_objective(name, **(PARAMETERS[name] if name != "tr_grpo" else {}))
    batch = random_step([4, 6, 5, 3], [1.0, 0.0, 0.3, 1.0], [0, 0, 1, 1])
    batch = replace(batch, response_ids=torch.tensor([5, 9, 2, 7]))

    def loss(prev, on_policy):
        current = batch.next_token_logprobs.detach().clone().requires_grad_()
        prepared = built.prepare(replace(batch, prev_logprobs=prev, next_token_logprobs=prev), seed=3)
        part = prepared.select(slice(None), next_token_logprobs=current)
        part = part.on_policy() if on_policy else part
        value, metrics = built.loss(part, **counts(batch))
        if on_policy:
            assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-12)
        return value, torch.autograd.grad(value, current)[0]

    scored = loss(batch.next_token_logprobs.detach(), on_policy=False)
    unscored = loss(batch.generation_logprobs, on_policy=True)
    assert torch.equal(scored[0], unscored[0])
    assert torch.equal(scored[1], unscored[1])
    assert scored[1].abs().max() > 0


def test_a_variant_that_reads_entropies_alone_waits_for_the_scoring_pass():
    class EntropyAlone(GRPO):
        needs_entropy: ClassVar[bool] = True

    config = EntropyAlone()
    assert not config.reads_scores
    assert config.build().needs_scores


GROUPS = {"aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.0}
CORRECTED = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.004,
    "truncated_importance_sampling_ratio_min": 0.996,
}
RANDOM = {"variant": "tr_grpo", "weighting": "random"}
PLAIN = {"gspo"}
"""Variants with neither: one ratio per response needs sequence_mean."""
CASES = {
    **{
        name: {"variant": name, **parameters, **GROUPS}
        for name, parameters in PARAMETERS.items()
        if name not in PLAIN
    },
    "dual clip": {"variant": "grpo", "ratio_clip_c": 1.1, **GROUPS},
    "no clip": {"variant": "grpo", "ratio_clip_min": None, "ratio_clip_max": None, **GROUPS},
    "corrected": {"variant": "dapo", **CORRECTED, **GROUPS},
    "weight inside": {"variant": "tr_grpo", "weight_placement": "inside", "upper": 1.2, **GROUPS},
    "random": {**RANDOM, "reference_policy_kl_penalty": 0.0},
    "random, plain penalty": {**RANDOM, "reference_policy_kl_penalty": 0.1, "kl_weighting": "none"},
    "random of groups": {**RANDOM, **GROUPS},
}


@pytest.mark.parametrize("case", CASES)
def test_folded_weights_give_the_same_loss_and_gradient(case):
    """Row by row; `declarations.folds` compares whole steps."""
    config = parse_loss_fn(CASES[case])
    assert config.folds
    batch = changed(example_step(), response_ids=torch.arange(5))
    if not config.needs_reference:
        batch = replace(batch, reference_policy_logprobs=None)
    loss, gradient, prepared = loss_and_gradient(config.build(), batch)
    rows = list(torch.arange(5).split(1))
    folded, of_folded, _ = loss_and_gradient(config.build(), batch, rows, folded=True)
    assert prepared.token_weights is not None or prepared.row_factors is not None
    torch.testing.assert_close(folded, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_folded, gradient, rtol=1e-12, atol=1e-12)


def test_folded_advantages_by_hand():
    batch = example_step()  # tokens: 4, 1, 0 in the first group, 3, 4 in the second
    prepared = (
        parse_loss_fn({"variant": "dr_grpo", "max_response_length": 7, **GROUPS})
        .build()
        .prepare(batch, seed=SEED)
    )
    folded = prepared.folded()
    centred = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.35, -0.35], dtype=torch.float64)
    factors = torch.tensor([0.5, 0.5, 0.5, 5 / 14, 5 / 14], dtype=torch.float64)  # 5 responses / 2 groups / n
    expected = (centred * factors)[:, None] * batch.mask
    torch.testing.assert_close(folded.advantages, expected, rtol=1e-12, atol=1e-12)
    assert folded.row_factors is None
