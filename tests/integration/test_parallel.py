"""Every layout, and packed microbatches, compute what one process computes in padded rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from ranks import run_ranks, slow_but
from small_models import TRAINED
from toy_policies import (
    LAYOUTS,
    PARAMETERS,
    UNSHARDED,
    assert_same,
    hf_model,
    one_step,
    outcome,
    policy_of,
    rollout,
    token_batch,
)

from nemo_grpo import build_objective
from nemo_grpo.engine.megatron.microbatches import plan_bins
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.variants import VARIANTS


@cache
def alone(**how: Any) -> dict[str, Any]:
    """On one rank, in padded rows."""
    return run_ranks(1, one_step, Layout(), **how)[0]


@pytest.mark.parametrize("name", slow_but([*LAYOUTS, *(f"{name} packed" for name in LAYOUTS)], "tp2-pp2"))
def test_every_variant_computes_the_same_at_every_layout(name):
    where, _, packed = name.partition(" ")
    num_layers = 3 if "uneven" in where else 2
    world_size, layout = LAYOUTS[where]
    how = {"num_layers": num_layers, "mb_tokens": 30 if packed else None}
    for found in run_ranks(world_size, one_step, layout, **how):
        assert_same(found, alone(num_layers=num_layers))  # every rank holds the whole result


@pytest.mark.parametrize("mb_tokens", [16, 30, 1000])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_packed_equals_padded_for_every_variant(mb_tokens, share_prompts):
    found = run_ranks(1, one_step, Layout(), mb_tokens=mb_tokens, share_prompts=share_prompts)[0]
    assert_same(found, alone(num_layers=2))


@pytest.mark.parametrize("size", [1, 9])
def test_no_variant_depends_on_the_microbatch_size(size):
    assert_same(run_ranks(1, one_step, Layout(), micro_batch_size=size)[0], alone(num_layers=2))


@pytest.mark.parametrize("family", TRAINED)
def test_packed_equals_padded_for_every_family(family):
    how = {"variants": ("grpo",), "family": family}
    assert_same(run_ranks(1, one_step, Layout(), mb_tokens=30, **how)[0], alone(**how))


@pytest.mark.parametrize("family", slow_but(TRAINED, "qwen3"))
def test_every_family_computes_the_same_in_parallel(family):
    how = {"variants": ("grpo",), "family": family}
    for world_size, layout in (LAYOUTS["tp2-pp2"], LAYOUTS["cp2"]):
        found = run_ranks(world_size, one_step, layout, settings=UNSHARDED, **how)[0]
        assert_same(found, alone(**how))


def scored_in_one_pass(layout: Layout, mb_tokens: int | None, scoring: bool) -> tuple[dict[str, Any], float]:
    """An update, and the scores before it: by a pass of their own, or by the update's."""
    policy, (sequences, rewards) = policy_of(hf_model("qwen3"), layout=layout), rollout()
    how = {"micro_batch_size": 2, "temperature": 0.9, "mb_tokens": mb_tokens}
    objective = build_objective("grpo")
    scores = None if scoring else policy.score(sequences, **how)
    prev = torch.zeros(9, 15) if scores is None else scores.logprobs
    prepared = objective.prepare(token_batch(sequences, rewards, prev))
    result = policy.update(objective, prepared, sequences, **how, scoring=scoring)
    scores = torch.stack(list(result.scores if scores is None else scores))
    return {"grpo": outcome(result, scores, policy)}, result.metrics["ratio/mean"]


@cache
def scored_apart(mb_tokens):
    return run_ranks(1, scored_in_one_pass, Layout(), mb_tokens, False)[0]


@pytest.mark.parametrize("mb_tokens", [None, 30])
@pytest.mark.parametrize("name", slow_but(["one", "dp2-pp2"], "one"))
def test_an_update_that_scores_equals_a_score_and_an_update(mb_tokens, name):
    world_size, layout = {"one": (1, Layout()), **LAYOUTS}[name]
    expected, _ = scored_apart(mb_tokens)
    for found, ratio in run_ranks(world_size, scored_in_one_pass, layout, mb_tokens, True):
        assert_same(found, expected)
        assert ratio == pytest.approx(1.0, abs=1e-6)


def test_bins_hold_whole_prompts_as_far_as_they_fit():
    sequences, _ = rollout()  # tokens in a stream: 5 + 8 + 0 + 3 + 5, 3 + 1 + 6, 4 + 2 + 2 + 7

    def bins(capacity: int, share: tuple[int, int] = (0, 1)) -> list[list[int]]:
        return [sorted(rows.tolist()) for rows in plan_bins(sequences, capacity, share)]

    assert bins(100) == [list(range(9))]
    assert bins(31) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]  # 21 + 10 and 15
    assert bins(16) == [[0, 1, 2], [6, 7, 8], [3], [4, 5]]  # 16, 15, 10 (5 + 5), 10
    assert sorted(row for part in bins(13) for row in part) == list(range(9))
    two = bins(100, (0, 2)), bins(100, (1, 2))
    assert two == ([[0, 1, 2, 3, 4]], [[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="13 tokens is longer than capacity=12"):
        bins(12)


def learned_from(layout: Layout, leave_out: bool, mb_tokens: int | None) -> dict[str, Any]:
    """One update per variant; of three groups the second has no signal.

    Returns: per variant (outcome, metrics, forward-only or not -> rows).
    """
    model, (sequences, _) = hf_model("qwen3"), rollout()
    how = {"micro_batch_size": 2, "temperature": 0.9, "mb_tokens": mb_tokens}
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 0, 1])
    found: dict[str, Any] = {}
    for variant, config in VARIANTS.items():
        policy, passes = policy_of(model, layout=layout), {False: [], True: []}
        scores = policy.score(sequences, **how)
        without_kl = {"reference_policy_kl_penalty": 0.0}
        without_kl = without_kl if "reference_policy_kl_penalty" in config.model_fields else {}
        objective = build_objective(variant, **PARAMETERS.get(variant, {}), **without_kl)
        objective = replace(objective, learns_without_advantages=not leave_out)
        further = {"entropies": scores.entropies, "reference_policy_logprobs": scores.logprobs - 0.05}
        prepared = objective.prepare(token_batch(sequences, rewards, scores.logprobs, **further))
        run = policy._run

        def counted(sequences, plan, *args, run=run, passes=passes, forward_only, **kwargs):
            passes[forward_only] += [row for micro in plan for row in micro.rows.tolist()]
            run(sequences, plan, *args, forward_only=forward_only, **kwargs)

        policy._run = counted
        result = policy.update(objective, prepared, sequences, **how)
        found[variant] = outcome(result, scores.logprobs, policy), result.metrics, passes
    return found


@pytest.mark.parametrize("name", slow_but(["one", "dp2", "tp2-pp2"], "one", "dp2"))
@pytest.mark.parametrize("mb_tokens", [None, 30])
def test_rows_without_a_gradient_are_only_scored_and_change_nothing(mb_tokens, name):
    world_size, layout = {"one": (1, Layout()), **LAYOUTS}[name]
    every = run_ranks(world_size, learned_from, layout, False, mb_tokens)
    some = run_ranks(world_size, learned_from, layout, True, mb_tokens)
    for variant in VARIANTS:
        for expected, found in zip(every, some, strict=True):
            assert_same({variant: found[variant][0]}, {variant: expected[variant][0]})
            assert found[variant][1] == pytest.approx(expected[variant][1], rel=1e-5, abs=1e-6), variant
        learned, scored = ({row for rank in some for row in rank[variant][2][k]} for k in (False, True))
        assert {4, 5} <= scored < {1, 4, 5, 9}, variant  # Clip-Cov may drop every token of row 1
        assert learned == {*range(9)} - scored, variant
