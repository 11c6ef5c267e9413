"""The nearest layout that fits, for a recipe that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log2
from typing import TYPE_CHECKING

from checkpoints_conv.families import ModelSpec
from nemo_grpo.errors import UserError, as_yaml
from nemo_grpo.plan.rules import problems
from nemo_grpo.plan.setup import Setup, setup_of
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

POWERS = (1, 2, 4, 8)
COSTS = {"tensor": 1.0, "pipeline": 1.5, "context": 1.5, "expert": 1.0, "rollout": 0.5, "recompute": 0.5}
"""What doubling or halving a size counts for; other GPUs than the recipe's count most."""

NODE_COST = 4.0
MAX_TRIALS = 12
"""Candidates that are loaded as recipes, with all of their rules, before the search gives up."""


def nearest_layout(recipe: Recipe, shape: ModelSpec, gpu_bytes: int) -> tuple[str, ...] | None:
    """Overrides that make the recipe fit with the fewest changes, or None if no layout of the search does.

    Tries TP, PP, CP, EP, full recomputation, vLLM's TP and up to eight times the nodes, nearest first.
    """
    from nemo_grpo.recipe import load_recipe_dict

    start, packed = setup_of(recipe), recipe.policy.sequence_packing.enabled
    trials = 0
    for candidate in sorted(_candidates(start, shape, packed), key=lambda setup: _distance(start, setup)):
        if problems(shape, candidate, gpu_bytes):
            continue
        overrides = overrides_between(start, candidate)
        try:
            load_recipe_dict(recipe.to_dict(), overrides)
        except UserError:
            trials += 1
            if trials == MAX_TRIALS:
                return None
            continue
        return overrides
    return None


def _candidates(start: Setup, shape: ModelSpec, packed: bool) -> Iterator[Setup]:
    experts = POWERS if shape.num_experts else (1,)
    contexts = POWERS[:3] if packed else (1,)
    recomputes = dict.fromkeys((start.recompute, ("full",)))
    for tp, pp, cp, ep, recompute, rollout, nodes in product(
        POWERS, POWERS, contexts, experts, recomputes, POWERS, POWERS
    ):
        world = start.gpus_per_node * start.num_nodes * nodes - start.num_rollout_gpus
        if world % (tp * pp * cp) or world % (pp * ep) or start.gpus_per_node % rollout:
            continue
        layout = layout_like(start, tp, pp, cp, ep)
        yield replace(
            start,
            layout=layout,
            num_nodes=start.num_nodes * nodes,
            recompute=recompute,
            vllm_tensor=rollout,
        )


def layout_like(start: Setup, tensor: int, pipeline: int, context: int, expert: int) -> Layout:
    """The layout of ``start`` at these sizes, with stages of equal length."""
    return replace(
        start.layout,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=1,
        sequence_parallel=tensor > 1,
        first_stage_layers=None,
        last_stage_layers=None,
    )


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


def overrides_between(start: Setup, candidate: Setup) -> tuple[str, ...]:
    """The changed keys as ``key=value``."""
    a, b = start.layout, candidate.layout
    values = {
        f"{MEGATRON}.tensor_model_parallel_size": (a.tensor, b.tensor),
        f"{MEGATRON}.sequence_parallel": (a.sequence_parallel, b.sequence_parallel),
        f"{MEGATRON}.pipeline_model_parallel_size": (a.pipeline, b.pipeline),
        f"{MEGATRON}.context_parallel_size": (a.context, b.context),
        f"{MEGATRON}.expert_model_parallel_size": (a.expert, b.expert),
        f"{MEGATRON}.expert_tensor_parallel_size": (a.expert_tensor, b.expert_tensor),
        f"{MEGATRON}.num_layers_in_first_pipeline_stage": (a.first_stage_layers, b.first_stage_layers),
        f"{MEGATRON}.num_layers_in_last_pipeline_stage": (a.last_stage_layers, b.last_stage_layers),
        f"{MEGATRON}.activation_checkpointing": (bool(start.recompute), bool(candidate.recompute)),
        f"{MEGATRON}.recompute_granularity": _granularities(start, candidate),
        "policy.make_sequence_length_divisible_by": (_padding(start), _padding(candidate)),
        "policy.train_micro_batch_size": tuple(s.train_tokens // s.max_length for s in (start, candidate)),
        f"{VLLM}.tensor_parallel_size": (start.vllm_tensor, candidate.vllm_tensor),
        f"{GENERATION}.colocated.resources.num_nodes": tuple(
            s.num_rollout_gpus // s.gpus_per_node for s in (start, candidate)
        ),
        "cluster.num_nodes": (start.num_nodes, candidate.num_nodes),
    }
    return tuple(f"{key}={as_yaml(new)}" for key, (old, new) in values.items() if old != new)


def _granularities(start: Setup, candidate: Setup) -> tuple[str, str]:
    changed = candidate.recompute != start.recompute and bool(start.recompute) and bool(candidate.recompute)
    return ("selective", "full") if changed else ("", "")


def _padding(setup: Setup) -> int:
    return 2 * setup.layout.context * setup.layout.tensor
