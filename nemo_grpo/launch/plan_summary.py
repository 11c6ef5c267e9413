"""The planner's verdict in one line, for a submission and for the preflight."""

from datetime import timedelta
from pathlib import Path

from nemo_grpo.launch.submit import signal_lead
from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.planner import plan_recipe
from nemo_grpo.recipe import Recipe
from nemo_grpo.support.errors import UserError

START = 85.0
"""Seconds until NeMo-RL's first step: Ray, workers and vLLM with a tiny model on two CPU cores, measured.
Larger models take longer."""
BYTES_PER_PARAMETER = {True: 14, False: 2}
"""Bytes per parameter of a checkpoint: bf16 weights, and with the optimizer fp32 weights and two moments."""


def plan_verdict(recipe: Recipe, gpu: str) -> tuple[bool, str]:
    """Check that a recipe fits on a kind of GPU; returns (accepted, why).

    Only cluster recipes are planned: embedded runs are small and check their own node.

    Args: gpu: a name of `nemo_grpo.plan.HARDWARE`.
    """
    if recipe.nemo_grpo.target != "cluster":
        return True, "embedded engine, not planned"
    plan = plan_recipe(recipe, gpu)
    if not plan.accepted:
        nearest = f"; fits: {' '.join(plan.nearest)}" if plan.nearest else ""
        return False, "; ".join(plan.problems) + nearest
    phase = max(plan.peaks, key=lambda name: plan.peaks[name])
    memory = f"{phase} {plan.peaks[phase] / 2**30:.0f} of {plan.usable_bytes / 2**30:.0f} GiB on {gpu}"
    return True, f"{plan.num_parameters / 1e9:.1f}e9 parameters, {memory}"


def time_verdict(recipe: Recipe, gpu: str, limit: timedelta, signal: str | None = None) -> tuple[bool, str]:
    """Check that a job's start, a step and a checkpoint fit into its time limit; returns (accepted, why).

    It refuses only if they do not fit even with a step that is faster than predicted by the worst known
    error. Recipes that are not planned are not compared with the limit.

    Args: signal: sbatch's option; None: the job script's.
    """
    target, seconds = recipe.nemo_grpo.target, limit.total_seconds()
    lead = signal_lead(target, signal)
    saves = recipe.checkpointing.enabled
    stop = f"{lead} s before the limit the job is told to {'save and stop' if saves else 'stop'}"
    found = plan_recipe(recipe, gpu).forecast if target == "cluster" else None
    if found is None:
        if seconds <= lead:
            return False, f"--time {limit}: {stop}; give more time, or --sbatch signal=B:USR1@SECONDS"
        return True, f"--time {limit}: not compared with the steps"
    step = found.step.seconds
    save = found.step.checkpoint if saves else 0.0
    least = START + step / (1 + found.error.worst) + save
    if seconds <= max(least, START + lead):
        checkpoint = f" and a checkpoint {save:.0f} s" if saves else ""
        fits = "not one of each fits" if saves else "not one fits"
        return False, (
            f"--time {limit}: a step takes about {step:.0f} s{checkpoint} on {gpu}, and {fits}: NeMo-RL "
            f"starts in {START:.0f} s or more, and {stop}; give more time or GPUs, or see nemo-grpo plan"
        )
    num_begun = 1 + int((seconds - START - lead) / step)  # the step of the signal is finished
    steps = max(min(found.steps_within(seconds - START), num_begun), 1)
    total = found.work.num_steps
    return True, (
        f"--time {limit}: about {min(steps, total)} of {total} steps of {step:.0f} s fit; NeMo-RL starts in "
        f"{START:.0f} s or more, and {stop}"
    )


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Estimate an upper bound of a checkpoint's bytes, ignoring LoRA; None: the model is not known.

    From the files of policy.model_name, taken as 2 bytes per parameter, or the planner's table.
    """
    per_parameter = BYTES_PER_PARAMETER[recipe.checkpointing.save_optimizer]
    if files := list(Path(recipe.policy.model_name or "/nonexistent").glob("*.safetensors")):
        return sum(file.stat().st_size for file in files) // 2 * per_parameter
    try:
        return plan_recipe(recipe).num_parameters * per_parameter
    except UserError:
        return None


def kind_of(name: str) -> str | None:
    """Find the planner's name of a GPU that calls itself ``name``; None: unknown.

    The planner's A100 has 80 GB, so that one of 40 GB is unknown.
    """
    if "40gb" in name.lower():
        return None
    return max((kind for kind in HARDWARE if kind in name.lower()), key=len, default=None)
