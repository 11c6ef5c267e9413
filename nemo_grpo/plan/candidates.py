"""Other layouts for a recipe: which sizes divide, as which overrides, and which of them the rules accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from checkpoints_conv.families import ModelSpec
from nemo_grpo.errors import UserError, as_yaml
from nemo_grpo.plan.rules import problems
from nemo_grpo.plan.setup import Setup, setup_of
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

COLOCATED = f"{GENERATION}.colocated"


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
    gpu_bytes: int,
    most_refused: int,
    further: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], Setup]]:
    """(overrides, setup) of those that fit and with which the recipe loads, until too many are refused.

    Args: further: overrides for all of them.
    """
    from nemo_grpo.recipe import load_recipe_dict

    start, refused = setup_of(recipe), 0
    for setup in ranked:
        if problems(shape, setup, gpu_bytes):
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
    a, b = start.layout, candidate.layout
    values: dict[str, tuple[Any, ...]] = {
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
        "policy.train_micro_batch_size": tuple(map(_rows, (start, candidate))),
        f"{VLLM}.tensor_parallel_size": (start.vllm_tensor, candidate.vllm_tensor),
        f"{COLOCATED}.enabled": (not start.num_rollout_gpus, not candidate.num_rollout_gpus),
        f"{COLOCATED}.resources.num_nodes": tuple(map(_rollout_nodes, (start, candidate))),
        f"{COLOCATED}.resources.gpus_per_node": tuple(map(_rollout_gpus, (start, candidate))),
        "cluster.num_nodes": (start.num_nodes, candidate.num_nodes),
        "cluster.gpus_per_node": (start.gpus_per_node, candidate.gpus_per_node),
    }
    if _rows(start) != _rows(candidate):  # a recipe may derive it from the rows that train
        values["policy.logprob_batch_size"] = (None, candidate.score_tokens // candidate.max_length)
    return tuple(f"{key}={as_yaml(new)}" for key, (old, new) in values.items() if old != new)


def _granularities(start: Setup, candidate: Setup) -> tuple[str, str]:
    changed = candidate.recompute != start.recompute and bool(start.recompute) and bool(candidate.recompute)
    return ("selective", "full") if changed else ("", "")


def _padding(setup: Setup) -> int:
    return 2 * setup.layout.context * setup.layout.tensor


def _rows(setup: Setup) -> int:
    """Sequences of a microbatch."""
    return setup.train_tokens // setup.max_length


def _rollout_nodes(setup: Setup) -> int | None:
    """Nodes that only sample; None: they share."""
    return -(-setup.num_rollout_gpus // setup.gpus_per_node) or None


def _rollout_gpus(setup: Setup) -> int | None:
    """GPUs that only sample, of each of those nodes."""
    return min(setup.num_rollout_gpus, setup.gpus_per_node) or None
