"""The fastest layouts that fit, as overrides for a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TYPE_CHECKING

from nemo_grpo.plan.candidates import accepted, candidates
from nemo_grpo.plan.forecast import Forecast, of_layout
from nemo_grpo.plan.setup import Setup

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

TENSOR, PIPELINE, CONTEXT, EXPERT = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4)
MAX_REFUSED = 60
"""Candidates that the recipe's own rules refuse before the search gives up."""


@dataclass(frozen=True)
class Found:
    """A layout: its overrides and its forecast."""

    overrides: tuple[str, ...]
    forecast: Forecast


def best_layouts(
    recipe: Recipe, base: Forecast, number: int = 3, further: tuple[str, ...] = ()
) -> list[Found]:
    """The fastest layouts on the forecast's GPUs that fit and that its rules allow, fastest first.

    Tries TP, PP, CP, EP, recomputation, rows per microbatch, vLLM's TP, and how many GPUs only sample. They
    wait for the update all the same, so the algorithm stays; rollouts that run ahead would change it, and
    those that already do keep GPUs of their own.

    Args: further: overrides that make the recipe's batch that of the forecast.
    """

    def forecast_of(setup: Setup) -> Forecast:
        return of_layout(base, setup)

    ranked = sorted(_candidates(recipe, base), key=lambda setup: forecast_of(setup).step.seconds)
    found = accepted(recipe, ranked, base.case.shape, base.case.hardware, MAX_REFUSED, further)
    return [Found(overrides, forecast_of(setup)) for overrides, setup in islice(found, number)]


def _candidates(recipe: Recipe, base: Forecast) -> Iterator[Setup]:
    start, shape = base.setup, base.case.shape
    batch = base.work.num_samples // base.work.num_updates
    pipelines = [stages for stages in PIPELINE if shape.num_layers % stages == 0]
    tensors = [ranks for ranks in TENSOR if start.gpus_per_node % ranks == 0]
    experts = [ranks for ranks in EXPERT if shape.num_experts % ranks == 0] if shape.num_experts else [1]
    sizes = tensors, pipelines, CONTEXT if start.packed else (1,), experts
    given = recipe.policy.sequence_packing.train_mb_tokens is not None
    rows_tried = (start.train_tokens // start.max_length,) if given else ROWS
    recomputes = dict.fromkeys((start.recompute, (), ("full",)))
    for setup in candidates(_rollouts(start, ahead=base.work.trajectory_age > 0), sizes, recomputes):
        for rows in rows_tried:
            if batch % (setup.data_parallel * rows) == 0:
                tokens = start.train_tokens if given else start.max_length * rows
                number = batch // setup.data_parallel // rows
                yield replace(setup, train_tokens=tokens, num_microbatches=number)


def _rollouts(start: Setup, *, ahead: bool) -> Iterator[Setup]:
    """vLLM's TP, and GPUs that only sample: whole nodes, or of a single node a part."""
    units, unit = start.num_nodes, start.gpus_per_node
    if units == 1:
        units, unit = start.gpus_per_node, 1
    separate = {max(units * eighths // 8, 1) * unit for eighths in range(1, 8)} if units > 1 else set()
    separate |= {start.num_rollout_gpus} if ahead else {start.num_rollout_gpus, 0}
    tensors = {ranks for ranks in TENSOR if ranks <= start.gpus_per_node} | {start.vllm_tensor}
    for gpus, tensor in product(sorted(separate), sorted(tensors)):
        if (gpus or start.num_nodes * start.gpus_per_node) % tensor == 0:
            yield replace(start, vllm_tensor=tensor, num_rollout_gpus=gpus)
