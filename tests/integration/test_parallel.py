"""Every layout, and packed microbatches, compute what one process computes in padded rows."""

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
from nemo_grpo.recipe.layout import MOST_LOGITS, Layout
from nemo_grpo.variants import VARIANTS


@cache
def alone(**how: Any) -> dict[str, Any]:
    """On one rank, in padded rows."""
    return run_ranks(1, one_step, Layout(), **how)[0]


PADDED: dict[str, tuple[dict[str, Any], int | None]] = {
    "padded": ({}, None),
    "padded, one row": ({"micro_batch_size": 1}, None),
    "padded, all rows, 3 tokens": ({"micro_batch_size": 9}, 3),  # of a row
    "padded, all rows, 20 tokens": ({"micro_batch_size": 9}, 20),  # some rows
}
PACKED: dict[str, tuple[dict[str, Any], int | None]] = {
    "packed by 16": ({"mb_tokens": 16}, None),
    "packed by 30": ({"mb_tokens": 30}, 20),
    "packed whole": ({"mb_tokens": 1000}, 3),
}
REPEATED: dict[str, tuple[dict[str, Any], int | None]] = {  # the format of Transformer Engine's attention
    "packed by 30, prompts repeated": ({"mb_tokens": 30, "share_prompts": False}, None),
    "packed whole, prompts repeated": ({"mb_tokens": 1000, "share_prompts": False}, 20),
}
"""How the rows of a step pass the model, and how many tokens' logits are made at a time."""
PAIRS = [("one", rows) for rows in (*PADDED, *PACKED, *REPEATED)]
for number, name in enumerate(LAYOUTS):  # each layout with padded and with packed rows, by turns
    PAIRS += [(name, list(rows)[number % len(rows)]) for rows in (PADDED, PACKED)]
QUICK = [("one", rows) for rows in ("padded, one row", "padded, all rows, 3 tokens", "packed by 16")]
QUICK += [("one", "packed whole, prompts repeated"), ("tp2-pp2", "packed by 16")]


ON_FOUR_RANKS = ("grpo", "clip_cov", "cw_grpo", "erpo", "gspo")
"""Variants whose numbers span tokens, responses, groups or the step."""


def one_step_in_parts(most_tokens: int | None, layout: Layout, **how: Any) -> dict[str, Any]:
    """`one_step` with the logits of this many tokens at a time."""
    if most_tokens is not None:
        MOST_LOGITS["cpu"] = most_tokens * 96 // layout.tensor  # in a process of its own
    return one_step(layout, **how)


@pytest.mark.parametrize("pair", slow_but(PAIRS, *QUICK), ids=" ".join)
def test_every_variant_computes_the_same_at_every_layout(pair):
    name, rows = pair
    num_layers = 3 if "uneven" in name else 2
    world_size, layout = {"one": (1, Layout()), **LAYOUTS}[name]
    how, most_tokens = (PADDED | PACKED | REPEATED)[rows]
    how = {**how, "num_layers": num_layers, **({"variants": ON_FOUR_RANKS} if world_size == 4 else {})}
    expected = alone(num_layers=num_layers)
    for found in run_ranks(world_size, one_step_in_parts, most_tokens, layout, **how):
        assert_same(found, {variant: expected[variant] for variant in found})  # every rank holds the whole


@pytest.mark.parametrize("family", TRAINED)
def test_every_family_computes_the_same_packed(family):
    how = {"variants": ("grpo",), "family": family}
    assert_same(run_ranks(1, one_step, Layout(), mb_tokens=30, **how)[0], alone(**how))


@pytest.mark.parametrize("family", slow_but(TRAINED, "qwen3"))
def test_every_family_computes_the_same_in_parallel(family):
    how = {"variants": ("grpo",), "family": family}
    for world_size, layout in (LAYOUTS["tp2-pp2"], LAYOUTS["cp2"]):
        found = run_ranks(world_size, one_step, layout, settings=UNSHARDED, **how)[0]
        assert_same(found, alone(**how))


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


AGGREGATIONS = ("group_token_mean", "sequence_mean")  # besides the variants' own


def learned_from(layout: Layout, leave_out: bool, mb_tokens: int | None, scoring: bool) -> dict[str, Any]:
    """One update per variant, and of GRPO per aggregation; of three groups the second has no signal.

    Args: scoring: the update scores in its own passes, in parts, for variants that can wait for it.
    Returns: per case (outcome, metrics, rows that this rank's passes computed, result, scores).
    """
    if scoring:
        MOST_LOGITS["cpu"] = 20 * 96  # in a process of its own
    model, (sequences, _) = hf_model("qwen3"), rollout()
    how = {"micro_batch_size": 2, "temperature": 0.9, "mb_tokens": mb_tokens}
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 0, 1])
    found: dict[str, Any] = {}
    for variant, aggregation in [*((v, None) for v in VARIANTS), *(("grpo", a) for a in AGGREGATIONS)]:
        policy, passed = policy_of(model, layout=layout), list[int]()
        scores = policy.score(sequences, **how)
        fields = VARIANTS[variant].model_fields
        without_kl = {"reference_policy_kl_penalty": 0.0} if "reference_policy_kl_penalty" in fields else {}
        objective = build_objective(variant, **PARAMETERS.get(variant, {}), **without_kl)
        if scoring and objective.needs_scores:
            continue
        objective = replace(objective, learns_without_advantages=not leave_out)
        objective = replace(objective, aggregation=aggregation or objective.aggregation)
        further = {"entropies": scores.entropies, "reference_policy_logprobs": scores.logprobs - 0.05}
        further["generation_logprobs"] = scores.logprobs  # of the sampler, whatever the update scores
        prev = scores.logprobs.clone()
        prev[[0, 8]] *= not scoring  # rows with signal, which the update scores itself
        prepared = objective.prepare(token_batch(sequences, rewards, prev, **further))
        run = policy._run

        def counted(sequences, plan, *args, run=run, passed=passed, **kwargs):
            passed += [row for micro in plan for row in micro.rows.tolist()]
            run(sequences, plan, *args, **kwargs)

        policy._run = counted
        result = policy.update(objective, prepared, sequences, **how, scoring=scoring)
        case = f"{variant} {aggregation or ''}"
        found[case] = outcome(result, scores.logprobs, policy), result.metrics, passed, result, scores
    return found


@pytest.mark.parametrize("name", slow_but(["one", "dp2", "tp2-pp2"], "one"))
@pytest.mark.parametrize(
    ("mb_tokens", "scoring"), [pytest.param(None, True, marks=pytest.mark.slow), (30, False), (30, True)]
)
def test_an_update_may_score_and_leave_out_rows_without_a_gradient(mb_tokens, scoring, name):
    world_size, layout = {"one": (1, Layout()), **LAYOUTS}[name]
    every = run_ranks(world_size, learned_from, layout, False, mb_tokens, False)
    some = run_ranks(world_size, learned_from, layout, True, mb_tokens, scoring)
    assert len(some[0]) > len(AGGREGATIONS) + (3 if scoring else 8)
    for case in some[0]:
        for expected, found in zip(every, some, strict=True):
            assert_same({case: found[case][0]}, {case: expected[case][0]})
            assert found[case][1] == pytest.approx(expected[case][1], rel=1e-5, abs=1e-6), case
            for key, value in found[case][0]["weights"].items():
                torch.testing.assert_close(value, expected[case][0]["weights"][key], rtol=1e-6, atol=1e-6)
        computed = {row for rank in some for row in rank[case][2]}
        left_out = {*range(9)} - computed
        assert {4, 5} <= left_out < {1, 4, 5, 9}, case  # Clip-Cov may drop every token of row 1
        result, scores = some[0][case][3:]
        assert set(result.computed.nonzero().flatten().tolist()) == computed, case
        if scoring:
            told = zip(result.scores, scores, strict=True)
            assert all(torch.allclose(a[result.computed], b[result.computed], atol=1e-5) for a, b in told)
