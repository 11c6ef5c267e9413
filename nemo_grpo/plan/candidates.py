"""Other layouts for a recipe: which divide, as which overrides, which the rules accept, and the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import log2
from typing import TYPE_CHECKING, Any

from nemo_grpo.errors import UserError, as_yaml
from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.rules import problems
from nemo_grpo.plan.setup import Setup, setup_of
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

COLOCATED = f"{GENERATION}.colocated"
POWERS = (1, 2, 4, 8)
COSTS = {"tensor": 1.0, "pipeline": 1.5, "context": 1.5, "expert": 1.0, "rollout": 0.5, "recompute": 0.5}
"""Cost of doubling or halving a size; other GPUs than the recipe's cost most."""
NODE_COST = 4.0
MAX_REFUSED = 12
"""Candidates that the recipe's own rules refuse before the search gives up."""


def candidates(
    starts: Iterable[Setup], sizes: Sequence[Sequence[int]], recomputes: Iterable[tuple[str, ...]]
) -> Iterator[Setup]:
    """Each start with each layout that divides its GPUs; stages have equal length.

    Args: sizes: of TP, PP, CP and EP.
    """
    for start, (tp, pp, cp, ep), recompute in product(starts, product(*sizes), recomputes):
        if start.world_size % (tp * pp * cp) or start.world_size % (pp * ep):
            continue
        layout = Layout(tp, pp, cp, ep, sequence_parallel=tp > 1)
        yield replace(start, layout=layout, recompute=recompute)


def accepted(
    recipe: Recipe,
    ranked: Iterable[Setup],
    shape: ModelSpec,
    gpu: Hardware,
    most_refused: int,
    further: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], Setup]]:
    """(overrides, setup) of those that fit and with which the recipe loads, until too many are refused.

    Args: further: overrides for all of them.
    """
    from nemo_grpo.recipe import load_recipe_dict

    start, refused = setup_of(recipe), 0
    for setup in ranked:
        if problems(shape, setup, gpu):
            continue
        overrides = (*further, *overrides_between(start, setup))
        try:
            load_recipe_dict(recipe.to_dict(), overrides)
        except UserError:
            refused += 1
            if refused == most_refused:
                return
            continue
        yield overrides, setup


def overrides_between(start: Setup, candidate: Setup) -> tuple[str, ...]:
    """The changed keys as ``key=value``."""
    old = _settings(start)
    changed = {key: value for key, value in _settings(candidate).items() if value != old[key]}
    if not (start.recompute and candidate.recompute):
        changed.pop(f"{MEGATRON}.recompute_granularity", None)
    if "policy.train_micro_batch_size" in changed:  # a recipe may derive it from the rows that train
        changed["policy.logprob_batch_size"] = candidate.score_tokens // candidate.max_length
    return tuple(f"{key}={as_yaml(value)}" for key, value in changed.items())


def _settings(setup: Setup) -> dict[str, Any]:
    """Keys and values by which a recipe has this setup."""
    layout, apart = setup.layout, setup.num_rollout_gpus
    return {
        f"{MEGATRON}.tensor_model_parallel_size": layout.tensor,
        f"{MEGATRON}.sequence_parallel": layout.sequence_parallel,
        f"{MEGATRON}.pipeline_model_parallel_size": layout.pipeline,
        f"{MEGATRON}.context_parallel_size": layout.context,
        f"{MEGATRON}.expert_model_parallel_size": layout.expert,
        f"{MEGATRON}.expert_tensor_parallel_size": layout.expert_tensor,
        f"{MEGATRON}.num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        f"{MEGATRON}.num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        f"{MEGATRON}.activation_checkpointing": bool(setup.recompute),
        f"{MEGATRON}.recompute_granularity": "full" if "full" in setup.recompute else "selective",
        "policy.make_sequence_length_divisible_by": 2 * layout.context * layout.tensor,
        "policy.train_micro_batch_size": setup.train_tokens // setup.max_length,
        f"{VLLM}.tensor_parallel_size": setup.vllm_tensor,
        f"{COLOCATED}.enabled": not apart,
        f"{COLOCATED}.resources.num_nodes": -(-apart // setup.gpus_per_node) or None,
        f"{COLOCATED}.resources.gpus_per_node": min(apart, setup.gpus_per_node) or None,
        "cluster.num_nodes": setup.num_nodes,
        "cluster.gpus_per_node": setup.gpus_per_node,
    }


def nearest_layout(recipe: Recipe, shape: ModelSpec, gpu: Hardware) -> tuple[str, ...] | None:
    """Overrides that make the recipe fit with the fewest changes, or None if no layout of the search does.

    Tries TP, PP, CP, EP, full recomputation, vLLM's TP and up to eight times the nodes, nearest first.
    """
    start = setup_of(recipe)
    contexts = POWERS[:3] if recipe.policy.sequence_packing.enabled else (1,)
    sizes = POWERS, POWERS, contexts, POWERS if shape.num_experts else (1,)
    tried = candidates(_starts(start), sizes, dict.fromkeys((start.recompute, ("full",))))
    ranked = sorted(tried, key=lambda setup: _distance(start, setup))
    found = next(accepted(recipe, ranked, shape, gpu, MAX_REFUSED), None)
    return found and found[0]


def _starts(start: Setup) -> Iterator[Setup]:
    """vLLM's TP, and more nodes."""
    for rollout, nodes in product(POWERS, POWERS):
        if start.gpus_per_node % rollout == 0:
            yield replace(start, num_nodes=start.num_nodes * nodes, vllm_tensor=rollout)


def _distance(start: Setup, candidate: Setup) -> float:
    a, b = start.layout, candidate.layout
    steps = {
        "tensor": log2(b.tensor / a.tensor),
        "pipeline": log2(b.pipeline / a.pipeline),
        "context": log2(b.context / a.context),
        "expert": log2(b.expert / a.expert),
        "rollout": log2(candidate.vllm_tensor / start.vllm_tensor),
        "recompute": float(candidate.recompute != start.recompute),
    }
    nodes = NODE_COST * log2(candidate.num_nodes / start.num_nodes)
    return nodes + sum(COSTS[name] * abs(step) for name, step in steps.items())
