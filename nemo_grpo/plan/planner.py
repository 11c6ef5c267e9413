"""Plan of a recipe on one kind of GPU: memory, problems, the nearest layout that fits, forecast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory
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

_HOW = {
    "weights": "{weights}",
    "reference": "the reference policy's own",
    "sampler": "its own, the whole model",
    "gradients": "whole buffer",
    "optimizer": "sharded over {shards} ranks",
    "activations": "{tokens} tokens, {recompute}",
    "logits": "last stage",
    "allowance": "contexts, NCCL, workspaces",
}


class Row(NamedTuple):
    """A part of the memory per GPU, and what it depends on."""

    part: str
    num_bytes: int
    how: str


@dataclass(frozen=True)
class Plan:
    """The needs of a recipe on one kind of GPU.

    Attributes: rows: parts of the training phase on its heaviest pipeline stage.
                peaks: phase -> bytes per GPU; empty where the layout itself is wrong.
                cache_tokens: tokens whose keys and values one vLLM engine can hold; 0 without vLLM.
                approximated, problems: sentences.
                nearest: overrides that make it fit; None where it fits, or where nothing was found.
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
    """Plan a loaded recipe, all of whose own rules hold.

    Args:    gpu: a name of `HARDWARE` or of the file, or `CPU`: this machine's, whose ranks share its memory.
             config_file: the model's config.json, for models that the table lacks.
             hardware_file: other kinds of GPU.  assumed: properties that the recipe does not state.
             others: recipes, one of whose runs may export the model.
    Returns: the plan, accepted or with its problems.
    """
    shape, setup = shape_of(recipe, config_file, others), plan_input(recipe)
    hardware = hardware_of(gpu, hardware_file)
    if gpu == CPU:
        if not setup.embedded:
            raise UserError("--gpu cpu: only the embedded engine trains on CPUs; name the cluster's GPU")
        hardware = replace(hardware, memory_bytes=hardware.memory_bytes / setup.gpus_per_node)
    found, parts = tuple(problems(shape, setup, hardware)), dict[str, Any]()
    if not messages(Scope.SHAPE, shape, setup):
        stage = memory.heaviest_stage(shape, setup)
        parts["num_stage_parameters"] = stage_counts(shape, setup.layout, stage).total
        parts["rows"], parts["peaks"] = _rows(shape, setup, stage), _peaks(shape, setup, stage)
        if setup.has_rollouts:
            room = memory.cache_bytes(shape, setup, int(hardware.memory_bytes))
            parts["cache_tokens"] = max(int(room / memory.cache_bytes_per_token(shape, setup)), 0)
            if not (list(gpu_has_fp8(shape, setup, hardware)) or recipe.loss_fn.learns_from_demonstrations):
                parts["forecast"] = forecast(recipe, shape, gpu, hardware, assumed or Assumptions())
    return Plan(
        name=recipe.nemo_grpo.run_name,
        gpu=gpu,
        shape=shape,
        setup=setup,
        data_parallel_size=recipe.data_parallel_size,
        num_parameters=model_parameters(shape),
        approximated=tuple(_approximated(shape, setup)),
        problems=found,
        nearest=nearest_layout(recipe, shape, hardware) if found else None,
        hardware=hardware,
        **parts,
    )


def _approximated(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
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
    facts = {
        "shards": setup.shards if setup.distributed_optimizer else 1,
        "tokens": setup.train_tokens // setup.layout.context,
        "weights": ("FP32" if setup.embedded and setup.precision_bytes == 4 else "BF16")
        + (", FP8 copies" if setup.fp8_training else ""),
        "recompute": " ".join(setup.recompute) + " recomputed" if setup.recompute else "all kept",
    }
    parts = {part: size for part, size in memory.training_bytes(shape, setup, stage).items() if size}
    return tuple(Row(part, size, _HOW[part].format(**facts)) for part, size in parts.items())


def _peaks(shape: ModelSpec, setup: PlanInput, stage: int) -> dict[str, int]:
    peaks = {
        "training": sum(memory.training_bytes(shape, setup, stage).values()),
        "scoring": memory.scoring_bytes(shape, setup, setup.layout.pipeline - 1),
    }
    if setup.has_rollouts and not setup.num_rollout_gpus:
        peaks["refit"] = memory.refit_bytes(shape, setup, stage)
    if setup.has_rollouts:
        peaks["rollout weights"] = memory.rollout_weight_bytes(shape, setup)
    return peaks
