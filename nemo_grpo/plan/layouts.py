"""Other layouts for a recipe: the nearest that fits, and the fastest, as overrides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import log2
from typing import TYPE_CHECKING, Any

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.forecast import Forecast, of_layout
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.inputs import PlanInput, plan_input
from nemo_grpo.plan.rules import problems
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM
from nemo_grpo.support.errors import UserError, as_yaml

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

COLOCATED = f"{GENERATION}.colocated"
POWERS = (1, 2, 4, 8)
COSTS = (1.0, 1.5, 1.5, 1.0, 0.5, 4.0)
"""Cost of doubling or halving TP, PP, CP, EP, vLLM's TP and the nodes, which cost most."""
RECOMPUTE_COST = 0.5
TENSOR, PIPELINE, CONTEXT, EXPERT = POWERS, (*POWERS, 16), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4)
MAX_REFUSED = {"nearest": 12, "fastest": 60}
"""Candidates refused by the recipe's own rules before a search gives up."""


def _laid_out(
    starts: Iterable[PlanInput], sizes: Sequence[Sequence[int]], recomputes: Iterable[tuple[str, ...]]
) -> Iterator[PlanInput]:
    """Yield each start with each (TP, PP, CP, EP) of ``sizes`` that divides its GPUs, in equal stages."""
    for start, (tp, pp, cp, ep), recompute in product(starts, product(*sizes), recomputes):
        if start.world_size % (tp * pp * cp) or start.world_size % (pp * ep):
            continue
        layout = Layout(tp, pp, cp, ep, sequence_parallel=tp > 1)
        yield replace(start, layout=layout, recompute=recompute)


def accepted(
    recipe: Recipe,
    ranked: Iterable[PlanInput],
    shape: ModelSpec,
    gpu: Hardware,
    most_refused: int,
    further: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], PlanInput]]:
    """Yield (overrides, setup) of layouts that fit and load, until the recipe's rules refuse too many.

    Args: further: overrides for all of them.
    """
    from nemo_grpo.recipe import load_recipe_dict

    start, refused = plan_input(recipe), 0
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


def overrides_between(start: PlanInput, candidate: PlanInput) -> tuple[str, ...]:
    """List the changed keys as ``key=value``."""
    old = _settings(start)
    changed = {key: value for key, value in _settings(candidate).items() if value != old[key]}
    if not (start.recompute and candidate.recompute):
        changed.pop(f"{MEGATRON}.recompute_granularity", None)
    if "policy.train_micro_batch_size" in changed:  # a recipe may derive it from the rows that train
        changed["policy.logprob_batch_size"] = candidate.score_tokens // candidate.max_length
    return tuple(f"{key}={as_yaml(value)}" for key, value in changed.items())


def _settings(setup: PlanInput) -> dict[str, Any]:
    """Return the recipe's keys and values for this setup."""
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
    """Find overrides that make the recipe fit with the fewest changes; None if no layout searched does.

    Tries TP, PP, CP, EP, full recomputation, vLLM's TP and up to eight times the nodes, nearest first.
    """
    start = plan_input(recipe)
    contexts = CONTEXT if recipe.policy.sequence_packing.enabled else (1,)
    sizes = POWERS, POWERS, contexts, POWERS if shape.num_experts else (1,)
    starts = (
        replace(start, num_nodes=start.num_nodes * nodes, vllm_tensor=rollout)
        for rollout, nodes in product(POWERS, POWERS)
        if start.gpus_per_node % rollout == 0
    )
    tried = _laid_out(starts, sizes, dict.fromkeys((start.recompute, ("full",))))
    ranked = sorted(tried, key=lambda setup: _distance(start, setup))
    found = next(accepted(recipe, ranked, shape, gpu, MAX_REFUSED["nearest"]), None)
    return found and found[0]


def _distance(start: PlanInput, candidate: PlanInput) -> float:
    def sizes(setup: PlanInput) -> tuple[int, ...]:
        layout = setup.layout
        model = layout.tensor, layout.pipeline, layout.context, layout.expert
        return (*model, setup.vllm_tensor, setup.num_nodes)

    pairs = zip(COSTS, sizes(start), sizes(candidate), strict=True)
    changed = sum(cost * abs(log2(after / before)) for cost, before, after in pairs)
    return changed + RECOMPUTE_COST * (candidate.recompute != start.recompute)


@dataclass(frozen=True)
class Found:
    """A layout: its overrides and its forecast."""

    overrides: tuple[str, ...]
    forecast: Forecast


def best_layouts(
    recipe: Recipe, base: Forecast, number: int = 3, further: tuple[str, ...] = ()
) -> list[Found]:
    """Find the fastest layouts on the forecast's GPUs that fit and that the recipe's rules allow.

    Tries TP, PP, CP, EP, recomputation, rows per microbatch, vLLM's TP, and the number of GPUs that only
    sample. Those still wait for the update, so that the algorithm stays the same; rollouts that already run
    ahead keep GPUs of their own.

    Args: further: overrides that make the recipe's batch that of the forecast.
    """
    ranked = sorted(_candidates(recipe, base), key=lambda setup: of_layout(base, setup).step.seconds)
    found = accepted(
        recipe, ranked, base.scenario.shape, base.scenario.hardware, MAX_REFUSED["fastest"], further
    )
    return [Found(overrides, of_layout(base, setup)) for overrides, setup in islice(found, number)]


def _candidates(recipe: Recipe, base: Forecast) -> Iterator[PlanInput]:
    start, shape = base.setup, base.scenario.shape
    batch = base.work.num_samples // base.work.num_updates
    pipelines = [stages for stages in PIPELINE if shape.num_layers % stages == 0]
    tensors = [ranks for ranks in TENSOR if start.gpus_per_node % ranks == 0]
    experts = [ranks for ranks in EXPERT if shape.num_experts % ranks == 0] if shape.num_experts else [1]
    sizes = tensors, pipelines, CONTEXT if start.packed else (1,), experts
    given = recipe.policy.sequence_packing.train_mb_tokens is not None
    rows_tried = (start.train_tokens // start.max_length,) if given else ROWS
    recomputes = dict.fromkeys((start.recompute, (), ("full",)))
    for setup in _laid_out(_rollouts(start, ahead=base.work.trajectory_age > 0), sizes, recomputes):
        for rows in rows_tried:
            if batch % (setup.data_parallel * rows) == 0:
                tokens = start.train_tokens if given else start.max_length * rows
                number = batch // setup.data_parallel // rows
                yield replace(setup, train_tokens=tokens, num_microbatches=number)


def _rollouts(start: PlanInput, *, ahead: bool) -> Iterator[PlanInput]:
    """Vary vLLM's TP and the GPUs that only sample: whole nodes, or a part of a single node."""
    units, unit = start.num_nodes, start.gpus_per_node
    if units == 1:
        units, unit = start.gpus_per_node, 1
    separate = {max(units * eighths // 8, 1) * unit for eighths in range(1, 8)} if units > 1 else set()
    separate |= {start.num_rollout_gpus} if ahead else {start.num_rollout_gpus, 0}
    tensors = {ranks for ranks in TENSOR if ranks <= start.gpus_per_node} | {start.vllm_tensor}
    for gpus, tensor in product(sorted(separate), sorted(tensors)):
        if (gpus or start.num_nodes * start.gpus_per_node) % tensor == 0:
            yield replace(start, vllm_tensor=tensor, num_rollout_gpus=gpus)
