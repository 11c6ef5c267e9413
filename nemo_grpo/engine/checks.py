"""Checks of a recipe against this machine before anything is built, and the choice of the device."""

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
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import load_config
from nemo_grpo.tasks import Task


@dataclass(frozen=True)
class Start:
    """Objects that `check` has built and that the run goes on with.

    Attributes:
        device: Device of this rank.
        task: Task of the recipe.
        began_as: Recipe that a resumed run began with.
    """

    device: torch.device
    task: Task
    began_as: Recipe | None = None


def check(recipe: Recipe, *, resume: bool) -> Start:
    """Run all checks that need no model, and return the objects that they have built."""
    device = check_machine(recipe)
    # The earlier run is compared below, after the check of its folder: without --resume a user should read
    # that the folder exists, not that its recipe differs.
    check_recipe(recipe, continues=False).refuse()
    check_fp8_fits_the_model(recipe)
    RunFolder(recipe.run_dir, checkpoints=recipe.checkpoint_dir, resume=resume).check()
    task = recipe.task.build()
    began_as = check_continuation(recipe) if resume else None
    return Start(device, task, began_as)


def check_machine(recipe: Recipe) -> torch.device:
    """Refuse a recipe for NeMo-RL, and a recipe that needs a device, FP8 or a tracker that is missing here.

    Returns:
        The device of this rank.
    """
    if recipe.nemo_grpo.target == "cluster":
        raise UserError(
            "nemo_grpo.target=cluster: this recipe is for NeMo-RL; `nemo-grpo launch RECIPE --time 04:00:00` "
            "submits it to Slurm, `nemo-grpo rehearse RECIPE` tries it here without a GPU"
        )
    device = choose_device(recipe)
    errors = list(options.fp8_refusals(recipe.policy.megatron_cfg, options.this_machine()))
    if errors:
        raise UserError("; ".join(errors))
    check_trackers(recipe)
    return device


def check_fp8_fits_the_model(recipe: Recipe) -> None:
    """Refuse FP8 for a model with widths that FP8's matrix products do not support."""
    name = recipe.policy.model_name
    megatron = recipe.policy.megatron_cfg
    if name is None or not megatron.fp8_in_use:
        return
    spec = read_spec(load_config(Path(name)).to_dict(), name, COMPUTED)
    errors = list(options.fp8_width_refusals(spec, megatron.layout, megatron.fp8_in_use.fp8_recipe))
    if errors:
        raise UserError("; ".join(errors))


def choose_device(recipe: Recipe) -> torch.device:
    """Return this rank's device. With ``auto`` it is the GPU numbered LOCAL_RANK, or the CPU without GPUs."""
    setting = recipe.nemo_grpo.engine.device
    has_gpu = torch.cuda.is_available()
    if setting == "cuda" and not has_gpu:
        raise UserError("nemo_grpo.engine.device=cuda: torch finds no CUDA device; use auto or cpu")
    if setting == "cpu" and has_gpu:
        raise UserError(
            "nemo_grpo.engine.device=cpu: megatron-core uses a GPU that it sees; hide it with "
            "CUDA_VISIBLE_DEVICES= in the environment, or use auto"
        )
    if not has_gpu:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node}: rank {local_rank} of this node has no "
            f"GPU, torch finds {num_gpus}; use {num_gpus}"
        )
    return torch.device("cuda", local_rank)
