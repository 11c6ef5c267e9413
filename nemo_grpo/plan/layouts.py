"""Other layouts for a recipe: the nearest that fits, and the fastest, as overrides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, log2
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
"""Cost of another recomputation, in the unit of `COSTS`."""

# Sizes that the search for the fastest layout tries.
TENSOR = POWERS
PIPELINE = (1, 2, 4, 8, 16)
CONTEXT = (1, 2, 4)
EXPERT = (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4)
"""Rows per microbatch that the search tries."""
MAX_REFUSED = {"nearest": 12, "fastest": 60}
"""Candidates refused by the recipe's own rules before a search gives up."""


def _laid_out(
    starts: Iterable[PlanInput], sizes: Sequence[Sequence[int]], recomputes: Iterable[tuple[str, ...]]
) -> Iterator[PlanInput]:
    """Yield every combination of a start, sizes (TP, PP, CP, EP), and a recomputation.

    Sizes that do not divide the start's training GPUs are left out. The stages have equally many layers.
    """
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

    Args:
        recipe: the recipe that is laid out anew.
        ranked: candidates, the best first.
        shape: the model.
        gpu: the kind of GPU.
        most_refused: candidates that the recipe's rules may refuse before the search ends.
        further: overrides that are added to those of every layout.
    """
    from nemo_grpo.recipe import load_recipe_dict

    start = plan_input(recipe)
    num_refused = 0
    for setup in ranked:
        # The planner's own rules first: loading a recipe is much slower.
        if problems(shape, setup, gpu):
            continue
        overrides = further + overrides_between(start, setup)
        try:
            load_recipe_dict(recipe.to_dict(), overrides)
        except UserError:
            num_refused += 1
            if num_refused == most_refused:
                return
            continue
        yield overrides, setup


def overrides_between(start: PlanInput, candidate: PlanInput) -> tuple[str, ...]:
    """List the changed keys as ``key=value``."""
    start_settings = _settings(start)
    changed = {key: value for key, value in _settings(candidate).items() if value != start_settings[key]}
    if not (start.recompute and candidate.recompute):
        # Without recomputation in one of the setups its granularity has no meaning, so it is no change.
        changed.pop(f"{MEGATRON}.recompute_granularity", None)
    if "policy.train_micro_batch_size" in changed:
        # A recipe may compute logprob_batch_size from the key that changes here, so it is set explicitly.
        changed["policy.logprob_batch_size"] = candidate.score_tokens // candidate.max_length
    return tuple(f"{key}={as_yaml(value)}" for key, value in changed.items())


def _settings(setup: PlanInput) -> dict[str, Any]:
    """Return the recipe's keys and values for this setup."""
    layout = setup.layout
    num_rollout_nodes = None
    rollout_gpus_per_node = None
    if setup.num_rollout_gpus:
        num_rollout_nodes = ceil(setup.num_rollout_gpus / setup.gpus_per_node)
        rollout_gpus_per_node = min(setup.num_rollout_gpus, setup.gpus_per_node)
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
        f"{COLOCATED}.enabled": setup.num_rollout_gpus == 0,
        f"{COLOCATED}.resources.num_nodes": num_rollout_nodes,
        f"{COLOCATED}.resources.gpus_per_node": rollout_gpus_per_node,
        "cluster.num_nodes": setup.num_nodes,
        "cluster.gpus_per_node": setup.gpus_per_node,
    }


def nearest_layout(recipe: Recipe, shape: ModelSpec, gpu: Hardware) -> tuple[str, ...] | None:
    """Find overrides that make the recipe fit, with as few changes as possible.

    Tries TP, PP, CP, EP, full recomputation, vLLM's TP and up to eight times the nodes, nearest first.

    Returns: the overrides, or None if none of these layouts fits.
    """
    start = plan_input(recipe)
    # Context parallelism needs packed rows.
    contexts = CONTEXT if recipe.policy.sequence_packing.enabled else (1,)
    experts = POWERS if shape.num_experts else (1,)
    starts = [
        replace(start, num_nodes=start.num_nodes * factor, vllm_tensor=vllm_tensor)
        for vllm_tensor, factor in product(POWERS, POWERS)
        if start.gpus_per_node % vllm_tensor == 0
    ]
    recomputes = dict.fromkeys((start.recompute, ("full",)))  # without a repetition, in this order
    candidates = _laid_out(starts, (POWERS, POWERS, contexts, experts), recomputes)
    ranked = sorted(candidates, key=lambda setup: _distance(start, setup))
    for overrides, _ in accepted(recipe, ranked, shape, gpu, MAX_REFUSED["nearest"]):
        return overrides
    return None


def _distance(start: PlanInput, candidate: PlanInput) -> float:
    """Sum the costs of the changes between two setups."""
    distance = 0.0
    for cost, before, after in zip(COSTS, _sizes(start), _sizes(candidate), strict=True):
        distance += cost * abs(log2(after / before))
    if candidate.recompute != start.recompute:
        distance += RECOMPUTE_COST
    return distance


def _sizes(setup: PlanInput) -> tuple[int, ...]:
    """Return the sizes whose changes `COSTS` rates, in its order."""
    layout = setup.layout
    return (
        layout.tensor,
        layout.pipeline,
        layout.context,
        layout.expert,
        setup.vllm_tensor,
        setup.num_nodes,
    )


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
    sample. GPUs that only sample still wait for each update, so that the algorithm stays the same. If the
    recipe's rollouts run ahead of training, every layout has GPUs that only sample.

    Args:
        recipe: the recipe that is laid out anew.
        base: the recipe's forecast, or one of the same layout on another number of GPUs.
        number: number of layouts to return.
        further: overrides that set the recipe's batch to that of the forecast.
    """
    ranked = sorted(_candidates(recipe, base), key=lambda setup: of_layout(base, setup).step.seconds)
    fitting = accepted(
        recipe, ranked, base.scenario.shape, base.scenario.hardware, MAX_REFUSED["fastest"], further
    )
    return [Found(overrides, of_layout(base, setup)) for overrides, setup in islice(fitting, number)]


def _candidates(recipe: Recipe, base: Forecast) -> Iterator[PlanInput]:
    """Yield all layouts of the search, whether they fit or not."""
    start = base.setup
    shape = base.scenario.shape
    batch = base.work.num_samples // base.work.num_updates  # sequences per update
    tensors = [ranks for ranks in TENSOR if start.gpus_per_node % ranks == 0]
    pipelines = [stages for stages in PIPELINE if shape.num_layers % stages == 0]
    contexts = CONTEXT if start.packed else (1,)
    experts = [1]
    if shape.num_experts:
        experts = [ranks for ranks in EXPERT if shape.num_experts % ranks == 0]
    sizes = (tensors, pipelines, contexts, experts)
    # A recipe that sets the tokens of a microbatch keeps them.
    has_fixed_tokens = recipe.policy.sequence_packing.train_mb_tokens is not None
    rows_per_microbatch = (start.train_tokens // start.max_length,) if has_fixed_tokens else ROWS
    recomputes = dict.fromkeys((start.recompute, (), ("full",)))
    rollouts = _rollouts(start, runs_ahead=base.work.trajectory_age > 0)
    for setup in _laid_out(rollouts, sizes, recomputes):
        for rows in rows_per_microbatch:
            if batch % (setup.data_parallel * rows) == 0:
                tokens = start.train_tokens if has_fixed_tokens else start.max_length * rows
                num_microbatches = batch // setup.data_parallel // rows
                yield replace(setup, train_tokens=tokens, num_microbatches=num_microbatches)


def _rollouts(start: PlanInput, *, runs_ahead: bool) -> Iterator[PlanInput]:
    """Vary vLLM's TP and the number of GPUs that only sample, in eighths of the job.

    These are whole nodes, or single GPUs if the job has one node.
    """
    num_units = start.num_nodes
    unit = start.gpus_per_node
    if start.num_nodes == 1:
        num_units = start.gpus_per_node
        unit = 1
    num_rollout_gpus = {start.num_rollout_gpus}
    if not runs_ahead:  # rollouts that run ahead cannot share the GPUs that train
        num_rollout_gpus.add(0)
    if num_units > 1:
        for eighths in range(1, 8):
            num_rollout_gpus.add(max(num_units * eighths // 8, 1) * unit)
    tensors = {ranks for ranks in TENSOR if ranks <= start.gpus_per_node}
    tensors.add(start.vllm_tensor)
    num_gpus = start.num_nodes * start.gpus_per_node
    for num_separate, tensor in product(sorted(num_rollout_gpus), sorted(tensors)):
        # Without GPUs of their own, rollouts use all.
        num_sampling = num_separate if num_separate else num_gpus
        if num_sampling % tensor == 0:
            yield replace(start, vllm_tensor=tensor, num_rollout_gpus=num_separate)
