"""The nearest layout that fits, for a recipe that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log2
from typing import TYPE_CHECKING

from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.candidates import accepted, candidates
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.setup import Setup, setup_of

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

POWERS = (1, 2, 4, 8)
COSTS = {"tensor": 1.0, "pipeline": 1.5, "context": 1.5, "expert": 1.0, "rollout": 0.5, "recompute": 0.5}
"""What doubling or halving a size counts for; other GPUs than the recipe's count most."""

NODE_COST = 4.0
MAX_REFUSED = 12
"""Candidates that the recipe's own rules refuse before the search gives up."""


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
