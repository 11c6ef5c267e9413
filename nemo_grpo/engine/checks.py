"""Checks of a recipe against this machine before anything is built, and its device and precision."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_grpo.engine.megatron import options
from nemo_grpo.models import COMPUTED, read_spec
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.continuation import check_continuation
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.run.trackers import check_trackers
from nemo_grpo.support import machine
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import load_config
from nemo_grpo.tasks import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Parts that a run starts with, made once.

    Attributes: device: of this rank.  began_as: the recipe that a resumed run began with.
    """

    device: torch.device
    task: Task
    began_as: Recipe | None = None


def check(recipe: Recipe, *, resume: bool) -> Start:
    """Refuse what can be refused without building a model, and return what the run starts with."""
    device = check_machine(recipe)
    check_recipe(recipe, continues=False).refuse()
    check_fp8_fits_the_model(recipe)
    RunFolder(recipe.run_dir, checkpoints=recipe.checkpoint_dir, resume=resume).check()
    return Start(device, recipe.task.build(), check_continuation(recipe) if resume else None)


def check_machine(recipe: Recipe) -> torch.device:
    """Refuse a recipe of the other engine, and what this machine lacks: FP8, a device, a tracker.

    Returns: this rank's device.
    """
    if recipe.nemo_grpo.target == "cluster":
        raise UserError(
            "nemo_grpo.target=cluster: this recipe is for NeMo-RL; `nemo-grpo launch RECIPE --time 04:00:00` "
            "submits it to Slurm, `nemo-grpo rehearse RECIPE` tries it here without a GPU"
        )
    if errors := list(options.fp8_refusals(recipe.policy.megatron_cfg, options.this_machine())):
        raise UserError("; ".join(errors))
    device = choose_device(recipe)
    check_trackers(recipe)
    return device


def check_fp8_fits_the_model(recipe: Recipe) -> None:
    """Refuse FP8 for a model whose widths its matrix products do not take."""
    name, megatron = recipe.policy.model_name, recipe.policy.megatron_cfg
    if name is None or not megatron.fp8_in_use:
        return
    spec = read_spec(load_config(Path(name)).to_dict(), name, COMPUTED)
    if errors := list(options.fp8_width_refusals(spec, megatron.layout, megatron.fp8_in_use.fp8_recipe)):
        raise UserError("; ".join(errors))


def check_ranks(recipe: Recipe) -> None:
    """Refuse a launch whose number of processes is not the recipe's."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != recipe.world_size:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node} x cluster.num_nodes="
            f"{recipe.cluster.num_nodes} are {recipe.world_size} ranks, but {launched} were launched; make "
            "them agree"
        )


def choose_device(recipe: Recipe) -> torch.device:
    """Return this rank's device; ``auto`` is the GPU numbered LOCAL_RANK if there are any, else the CPU."""
    wanted, found = recipe.nemo_grpo.engine.device, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise UserError("nemo_grpo.engine.device=cuda: torch finds no CUDA device; use auto or cpu")
    if wanted == "cpu" and found:
        raise UserError(
            "nemo_grpo.engine.device=cpu: megatron-core uses a GPU that it sees; hide it with "
            "CUDA_VISIBLE_DEVICES= in the environment, or use auto"
        )
    if not found:
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node}: rank {local_rank} of this node has no "
            f"GPU, torch finds {num_gpus}; use {num_gpus}"
        )
    return torch.device("cuda", local_rank)


def choose_precision(
    recipe: Recipe, device: torch.device, width: int, earlier: Recipe | None, *, leads: bool
) -> Recipe:
    """Replace ``auto`` in the recipe by a precision.

    Args: width: the model's hidden size.  earlier: the recipe that a resumed run began with, whose precision
          it keeps.  leads: this rank logs the choice.
    """
    asked, on_gpu = recipe.policy.precision, device.type == "cuda"
    if asked == "auto" and earlier is not None:
        precision: str = earlier.policy.precision
    else:
        precision = "bfloat16" if asked == "auto" and on_gpu else machine.precision(asked, width)
    if leads and asked == "auto":
        log.info("policy.precision=auto: %s", precision)
    if leads and precision == "bfloat16" and not (on_gpu or machine.has_bf16()):
        log.warning(
            "policy.precision=bfloat16: this processor has no BF16 instructions; on one like it BF16 "
            "products took 6 to 10 times as long as FP32's: use auto or float32 in a new run"
        )
    return recipe.with_precision(precision)
