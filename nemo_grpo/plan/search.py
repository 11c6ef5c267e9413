"""The fastest layouts that fit, as overrides for a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from checkpoints_conv.families import ModelSpec
from nemo_grpo.dotted import value_of
from nemo_grpo.errors import UserError
from nemo_grpo.plan.forecast import Forecast
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.nearest import layout_like, overrides_between
from nemo_grpo.plan.rules import problems
from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.step_time import StepTime, step_time
from nemo_grpo.recipe.sections import PACKING

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

TENSOR, PIPELINE, CONTEXT, EXPERT = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4)
MAX_TRIALS = 60
"""Candidates that are loaded as recipes, with all of their rules, before the search gives up."""


@dataclass(frozen=True)
class Found:
    """A layout: its overrides and its step."""

    overrides: tuple[str, ...]
    setup: Setup
    step: StepTime


def best_layouts(
    recipe: Recipe, base: Forecast, shape: ModelSpec, hardware: Hardware, number: int = 3
) -> list[Found]:
    """The fastest layouts on the recipe's GPUs that fit and that its rules allow, fastest first.

    Tries TP, PP, CP, EP, recomputation, rows per microbatch, vLLM's TP and, where rollouts run ahead on GPUs
    of their own, how many nodes they have. Whether they do is left as it is: it changes the algorithm.
    """
    from nemo_grpo.recipe import load_recipe_dict

    def seconds(setup: Setup) -> float:
        return step_time(shape, setup, base.work, hardware).seconds

    ranked = sorted(_candidates(recipe, base.setup, shape), key=seconds)
    found: list[Found] = []
    trials = 0
    for setup in ranked:
        if problems(shape, setup, int(hardware.memory_bytes)):
            continue
        overrides = overrides_between(base.setup, setup)
        trials += 1
        try:
            load_recipe_dict(recipe.to_dict(), overrides)
        except UserError:
            if trials == MAX_TRIALS:
                break
            continue
        found.append(Found(overrides, setup, step_time(shape, setup, base.work, hardware)))
        if len(found) == number:
            break
    return found


def _candidates(recipe: Recipe, start: Setup, shape: ModelSpec) -> Iterator[Setup]:
    contexts = CONTEXT if start.packed else (1,)
    experts = [n for n in EXPERT if shape.num_experts % n == 0] if shape.num_experts else [1]
    recomputes = dict.fromkeys((start.recompute, (), ("full",)))
    batch = recipe.policy.train_global_batch_size
    rollouts = list(_rollouts(start))
    given = value_of(recipe, f"{PACKING}.train_mb_tokens") is not None
    sizes = (start.train_tokens // start.max_length,) if given else ROWS
    for tp, pp, cp, ep, recompute, rows in product(TENSOR, PIPELINE, contexts, experts, recomputes, sizes):
        layout = layout_like(start, tp, pp, cp, ep)
        if shape.num_layers % pp or start.gpus_per_node % tp:
            continue
        for rollout in rollouts:
            world = rollout.world_size
            parallel = world // (tp * pp * cp)
            if world % (tp * pp * cp) or world % (pp * ep) or batch % (parallel * rows):
                continue
            yield replace(
                rollout,
                layout=layout,
                recompute=recompute,
                train_tokens=start.train_tokens if given else start.max_length * rows,
                num_microbatches=batch // parallel // rows,
            )


def _rollouts(start: Setup) -> Iterator[Setup]:
    """vLLM's TP, and the nodes that only sample."""
    nodes = [start.num_rollout_gpus]
    if start.num_rollout_gpus and start.num_nodes > 1:
        nodes = [count * start.gpus_per_node for count in range(1, start.num_nodes)]
    for tp, gpus in product((*TENSOR, start.vllm_tensor), nodes):
        if tp <= start.gpus_per_node or tp == start.vllm_tensor:
            yield replace(start, vllm_tensor=tp, num_rollout_gpus=gpus)
