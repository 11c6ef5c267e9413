"""Packed microbatches compute what padded rows compute; an update that scores is a score and an update."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks, slow_but
from small_models import TRAINED
from test_parallel import EXTRA, LAYOUTS, assert_same, hf_model

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.engine.megatron.microbatches import plan_bins
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.rollout import Sequences
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.variants import OBJECTIVES

SETTINGS = MegatronOptimizer(lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05)


def rollout() -> tuple[Sequences, torch.Tensor]:
    """Three prompts of 5, 3 and 4 tokens with 4, 2 and 3 responses of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    prompts = torch.randint(96, (3, 16), generator=generator)[prompt_ids]
    prompt_lengths = torch.tensor([5, 3, 4])[prompt_ids]
    lengths = prompt_lengths + torch.tensor([9, 1, 4, 6, 2, 7, 3, 3, 8])
    ids = torch.randint(96, (9, 16), generator=generator)
    ids = torch.where(torch.arange(16) < prompt_lengths[:, None], prompts, ids)
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1, 1])
    return Sequences(ids, lengths, prompt_lengths, prompt_ids), rewards


def token_batch(sequences: Sequences, rewards: torch.Tensor, **scores: torch.Tensor) -> TokenBatch:
    column = torch.arange(sequences.input_ids.shape[1] - 1)
    inside = column < sequences.lengths[:, None] - 1
    return TokenBatch(
        token_mask=inside & (column >= sequences.prompt_lengths[:, None] - 1),
        sample_mask=torch.ones(len(rewards)),
        rewards=rewards,
        group_ids=sequences.prompt_ids,
        **scores,
    )


def one_step(
    layout: Layout,
    variants: list[str],
    mb_tokens: int | None,
    share_prompts: bool = True,
    family: str = "qwen2-tied",
    config_fields: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Score and update once with each variant, from the same weights; only scores of responses."""
    model, (sequences, rewards) = hf_model(family, 2), rollout()
    found: dict[str, Any] = {}
    for variant in variants:
        policy = MegatronPolicy(model.config, SETTINGS, layout=layout, config_fields=config_fields or {})
        policy.load_weights(dict(model.state_dict()), keep_reference=True)
        policy.share_prompts = share_prompts
        how = {"micro_batch_size": 2, "temperature": 0.9, "mb_tokens": mb_tokens}
        prev, entropies = policy.score(sequences, **how)
        with policy.reference_weights():
            reference = policy.score(sequences, **how, with_entropies=False).logprobs
        mask = token_batch(sequences, rewards, prev_logprobs=prev).mask
        scores = torch.stack([prev, entropies, reference]) * mask
        # The step-level part must see the same numbers: clip_cov draws by their bits, erpo amplifies them.
        prev, entropies, reference = ((1000 * x).round() / 1000 for x in scores)
        batch = token_batch(
            sequences,
            rewards,
            prev_logprobs=prev,
            entropies=entropies,
            reference_policy_logprobs=reference - 0.1 * entropies,
        )
        objective = build_objective(variant, **EXTRA.get(variant, {}))
        result = policy.update(objective, objective.prepare(batch), sequences, **how)
        found[variant] = {
            "scores": scores,
            "loss": result.metrics["loss/total"],
            "grad_norm": result.grad_norm,
            "weights": {name: tensor.clone() for name, tensor in policy.named_tensors()},
        }
    return found


@pytest.fixture(scope="module")
def padded() -> dict[str, Any]:
    """Every variant on one rank, in padded rows."""
    return run_ranks(1, one_step, Layout(), list(OBJECTIVES), None)[0]


@pytest.mark.parametrize("mb_tokens", [16, 30, 1000])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_packed_equals_padded_for_every_variant(padded, mb_tokens, share_prompts):
    assert_same(run_ranks(1, one_step, Layout(), list(OBJECTIVES), mb_tokens, share_prompts)[0], padded)


@pytest.mark.parametrize("name", slow_but(LAYOUTS))
def test_packed_equals_padded_at_every_layout(padded, name):
    if "uneven" in name:
        pytest.skip("three layers; tested unpacked")
    world_size, layout = LAYOUTS[name]
    for found in run_ranks(world_size, one_step, layout, list(OBJECTIVES), 30):
        assert_same(found, padded)


@pytest.mark.parametrize("family", TRAINED)
def test_packed_equals_padded_for_every_family(family):
    padded, packed = (
        run_ranks(1, one_step, Layout(), ["grpo"], mb_tokens, True, family)[0] for mb_tokens in (None, 30)
    )
    assert_same(packed, padded)


def scored_in_one_pass(
    layout: Layout, mb_tokens: int | None, scoring: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """An update, and the scores before it: by a pass of their own, or by the update's."""
    model, (sequences, rewards) = hf_model("qwen3", 2), rollout()
    policy = MegatronPolicy(model.config, SETTINGS, layout=layout)
    policy.load_weights(dict(model.state_dict()), keep_reference=False)
    how = {"micro_batch_size": 2, "temperature": 0.9, "mb_tokens": mb_tokens}
    objective = build_objective("grpo")
    scores = None if scoring else policy.score(sequences, **how)
    prev = torch.zeros(9, 15) if scores is None else scores.logprobs
    prepared = objective.prepare(token_batch(sequences, rewards, prev_logprobs=prev))
    result = policy.update(objective, prepared, sequences, **how, scoring=scoring)
    scores = result.scores if scores is None else scores
    found = {
        "scores": torch.stack(list(scores)),
        "loss": result.metrics["loss/total"],
        "grad_norm": result.grad_norm,
        "weights": {name: tensor.clone() for name, tensor in policy.named_tensors()},
    }
    return {"grpo": found}, result.metrics["ratio/mean"]


@functools.cache
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

    def bins(capacity: int, share: tuple[int, int] = (0, 1), share_prompts: bool = True) -> list[list[int]]:
        found = plan_bins(sequences, capacity, share, share_prompts=share_prompts)
        return [sorted(rows.tolist()) for rows in found]

    assert bins(100) == [list(range(9))]
    assert bins(31) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]  # 21 + 10 and 15
    assert bins(16) == [[0, 1, 2], [6, 7, 8], [3], [4, 5]]  # 16, 15, 10 (5 + 5), 10
    assert sorted(row for part in bins(13) for row in part) == list(range(9))
    two = bins(100, (0, 2)), bins(100, (1, 2))
    assert two == ([[0, 1, 2, 3, 4]], [[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="13 tokens is longer than capacity=12"):
        bins(12)
