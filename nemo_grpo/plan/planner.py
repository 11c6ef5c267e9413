"""Plan of a recipe on one kind of GPU: memory, problems, the nearest layout that fits, forecast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory, rollout_memory
from nemo_grpo.plan.forecast import Assumptions, Forecast, forecast
from nemo_grpo.plan.hardware import CPU, Hardware, hardware_of
from nemo_grpo.plan.inputs import PlanInput, plan_input, shape_of
from nemo_grpo.plan.layouts import nearest_layout
from nemo_grpo.plan.parameters import model_parameters, stage_counts
from nemo_grpo.plan.rules import gpu_has_fp8, problems
from nemo_grpo.recipe.registry import Scope, messages
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

_DEPENDENCE = {
    "weights": "{weights}",
    "reference": "the reference policy's own",
    "sampler": "its own, the whole model",
    "gradients": "whole buffer",
    "optimizer": "sharded over {shards} ranks",
    "activations": "{tokens} tokens, {recompute}",
    "logits": "last stage",
    "allowance": "contexts, NCCL, workspaces",
}
"""Part of the memory -> what it depends on, in the plan's table."""


class Row(NamedTuple):
    """A part of the memory per GPU, and what it depends on."""

    part: str
    num_bytes: int
    how: str


@dataclass(frozen=True)
class Plan:
    """The needs of a recipe on one kind of GPU.

    Attributes:
        name: the run's name.
        gpu: name of the kind of GPU.
        shape: the model.
        setup: the recipe's layout and settings.
        data_parallel_size: copies of the model that share a batch.
        num_parameters: parameters of the model.
        approximated: sentences about parts that the formulas approximate.
        problems: sentences about rules that do not hold.
        nearest: overrides that make it fit; None where it fits, or where no layout was found.
        hardware: the kind of GPU.
        num_stage_parameters: parameters per GPU of the heaviest pipeline stage.
        rows: parts of the training phase on that stage.
        peaks: phase -> bytes per GPU; empty where the layout itself is wrong.
        cache_tokens: tokens whose keys and values one vLLM engine can hold; 0 without vLLM.
        forecast: None without rollouts, where the layout is wrong, or for the embedded engine.
    """

    name: str
    gpu: str
    shape: ModelSpec
    setup: PlanInput
    data_parallel_size: int
    num_parameters: int
    approximated: tuple[str, ...]
    problems: tuple[str, ...]
    nearest: tuple[str, ...] | None
    hardware: Hardware
    num_stage_parameters: int = 0
    rows: tuple[Row, ...] = ()
    peaks: dict[str, int] = field(default_factory=dict)
    cache_tokens: int = 0
    forecast: Forecast | None = None

    @property
    def accepted(self) -> bool:
        """True if the recipe can run on this kind of GPU."""
        return not self.problems

    @property
    def usable_bytes(self) -> int:
        """Bytes of one GPU that a plan may fill."""
        return int(memory.USABLE * self.hardware.memory_bytes)


def plan_recipe(
    recipe: Recipe,
    gpu: str = "h100",
    config_file: Path | None = None,
    hardware_file: Path | None = None,
    assumed: Assumptions | None = None,
    others: Iterable[Recipe] = (),
) -> Plan:
    """Plan a recipe that has been loaded, so that its own rules hold.

    Args:
        recipe: the recipe.
        gpu: name of a kind of GPU in `HARDWARE` or in ``hardware_file``; or `CPU`, for this machine.
        config_file: the model's config.json, for models that the table lacks.
        hardware_file: file that describes further kinds of GPU.
        assumed: properties that the recipe does not state.
        others: recipes, one of whose runs may export the model.
    Returns: the plan, accepted or with its problems.
    """
    shape = shape_of(recipe, config_file, others)
    setup = plan_input(recipe)
    hardware = hardware_of(gpu, hardware_file)
    if gpu == CPU:
        if not setup.embedded:
            raise UserError("--gpu cpu: only the embedded engine trains on CPUs; name the cluster's GPU")
        # All ranks run on this machine and share its memory.
        hardware = replace(hardware, memory_bytes=hardware.memory_bytes / setup.gpus_per_node)
    broken_rules = tuple(problems(shape, setup, hardware))
    numbers: dict[str, Any] = {}
    # Where the layout does not divide the model, the formulas' integer divisions mean nothing.
    if not messages(Scope.SHAPE, shape, setup):
        numbers = _memory_numbers(shape, setup, hardware)
        if _can_be_forecast(recipe, shape, setup, hardware):
            numbers["forecast"] = forecast(recipe, shape, gpu, hardware, assumed or Assumptions())
    return Plan(
        name=recipe.nemo_grpo.run_name,
        gpu=gpu,
        shape=shape,
        setup=setup,
        data_parallel_size=recipe.data_parallel_size,
        num_parameters=model_parameters(shape),
        approximated=tuple(_approximated(shape, setup)),
        problems=broken_rules,
        nearest=nearest_layout(recipe, shape, hardware) if broken_rules else None,
        hardware=hardware,
        **numbers,
    )


def _memory_numbers(shape: ModelSpec, setup: PlanInput, hardware: Hardware) -> dict[str, Any]:
    """Compute the attributes of a `Plan` that tell its memory: name -> value."""
    stage = memory.heaviest_stage(shape, setup)
    numbers: dict[str, Any] = {
        "num_stage_parameters": stage_counts(shape, setup.layout, stage).total,
        "rows": _rows(shape, setup, stage),
        "peaks": _peaks(shape, setup, stage),
    }
    if setup.has_rollouts:
        cache_bytes = rollout_memory.cache_bytes(shape, setup, int(hardware.memory_bytes))
        bytes_per_token = rollout_memory.cache_bytes_per_token(shape, setup)
        numbers["cache_tokens"] = max(int(cache_bytes / bytes_per_token), 0)
    return numbers


def _can_be_forecast(recipe: Recipe, shape: ModelSpec, setup: PlanInput, hardware: Hardware) -> bool:
    """Return True if the formulas can predict the time of the recipe's steps on this hardware."""
    # Demonstrations have no rollout to time.
    if not setup.has_rollouts or recipe.loss_fn.learns_from_demonstrations:
        return False
    # FP8 on a GPU without it has a peak of 0 FLOP/s, by which the formulas would divide.
    fp8_problems = list(gpu_has_fp8(shape, setup, hardware))
    return not fp8_problems


def _approximated(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    """Yield sentences about what the formulas approximate in this recipe."""
    if setup.draft_tokens and setup.draft_layers:
        yield "drafts are taken to cost a layer of the policy and its output matrix, whatever makes them"
    if shape.sliding_window:
        yield (
            f"layers that see {shape.sliding_window} positions are counted as if they saw all; KV cache and "
            "times are upper bounds"
        )
    if shape.linear_layers:
        yield (
            f"{len(shape.linear_layers)} layers of linear attention are taken to keep the activations of "
            "attention; of their time only matrix products count, and not the state that vLLM keeps for each "
            "sequence"
        )


def _rows(shape: ModelSpec, setup: PlanInput, stage: int) -> tuple[Row, ...]:
    """List the parts of the training phase that need memory, each with what its size depends on."""
    weights = "FP32" if setup.embedded and setup.precision_bytes == 4 else "BF16"
    if setup.fp8_training:
        weights += ", FP8 copies"
    recompute = "all kept"
    if setup.recompute:
        recompute = " ".join(setup.recompute) + " recomputed"
    values = {
        "shards": setup.shards if setup.distributed_optimizer else 1,
        "tokens": setup.train_tokens // setup.layout.context,
        "weights": weights,
        "recompute": recompute,
    }
    rows = []
    for part, num_bytes in memory.training_bytes(shape, setup, stage).items():
        if num_bytes:
            rows.append(Row(part, num_bytes, _DEPENDENCE[part].format(**values)))
    return tuple(rows)


def _peaks(shape: ModelSpec, setup: PlanInput, stage: int) -> dict[str, int]:
    """Compute the bytes per GPU of each phase. Scoring peaks on the last stage, which has the logits."""
    peaks = {
        "training": sum(memory.training_bytes(shape, setup, stage).values()),
        "scoring": memory.scoring_bytes(shape, setup, setup.layout.pipeline - 1),
    }
    if setup.has_rollouts and not setup.num_rollout_gpus:
        peaks["refit"] = rollout_memory.refit_bytes(shape, setup, stage)
    if setup.has_rollouts:
        peaks["rollout weights"] = rollout_memory.rollout_weight_bytes(shape, setup)
    return peaks
