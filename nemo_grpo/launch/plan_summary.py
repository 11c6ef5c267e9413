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
BYTES_OF_WEIGHT = 2
"""Bytes per parameter of a checkpoint in bf16."""
BYTES_OF_OPTIMIZER = 12
"""Further bytes per parameter with the optimizer: weights and two moments in fp32."""


def plan_verdict(recipe: Recipe, gpu: str) -> tuple[bool, str]:
    """Check that a recipe fits on a kind of GPU; returns (accepted, why).

    Only cluster recipes are planned. Embedded runs are accepted, because they are small.

    Args:
        recipe: a cluster or an embedded recipe.
        gpu: name of a GPU in `nemo_grpo.plan.HARDWARE`.
    """
    if recipe.nemo_grpo.target != "cluster":
        return True, "embedded engine, not planned"
    plan = plan_recipe(recipe, gpu)
    if not plan.accepted:
        sentence = "; ".join(plan.problems)
        if plan.nearest:
            sentence += f"; fits: {' '.join(plan.nearest)}"
        return False, sentence
    phase = max(plan.peaks, key=lambda name: plan.peaks[name])
    peak = plan.peaks[phase] / 2**30
    usable = plan.usable_bytes / 2**30
    parameters = f"{plan.num_parameters / 1e9:.1f}e9 parameters"
    return True, f"{parameters}, {phase} {peak:.0f} of {usable:.0f} GiB on {gpu}"


def time_verdict(recipe: Recipe, gpu: str, limit: timedelta, signal: str | None = None) -> tuple[bool, str]:
    """Check that a job's start, a step and a checkpoint fit into its time limit; returns (accepted, why).

    A prediction may be too slow. So the check refuses only if the limit is too short even for a step that is
    faster than predicted by the worst error known. Recipes that are not planned are accepted.

    Args:
        recipe: a cluster or an embedded recipe.
        gpu: name of a GPU in `nemo_grpo.plan.HARDWARE`.
        limit: time limit of one attempt.
        signal: value of sbatch's --signal; None if the job script's own holds.
    """
    target = recipe.nemo_grpo.target
    seconds = limit.total_seconds()
    lead = signal_lead(target, signal)
    saves = recipe.checkpointing.enabled
    request = "save and stop" if saves else "stop"
    stop = f"{lead} s before the limit the job is told to {request}"
    forecast = plan_recipe(recipe, gpu).forecast if target == "cluster" else None
    if forecast is None:
        if seconds <= lead:
            return False, f"--time {limit}: {stop}; give more time, or --sbatch signal=B:USR1@SECONDS"
        return True, f"--time {limit}: not compared with the steps"
    step = forecast.step.seconds
    save = forecast.step.checkpoint if saves else 0.0
    least = START + step / (1 + forecast.error.worst) + save
    if seconds <= max(least, START + lead):
        durations = f"a step takes about {step:.0f} s"
        verdict = "not one fits"
        if saves:
            durations += f" and a checkpoint {save:.0f} s"
            verdict = "not one of each fits"
        return False, (
            f"--time {limit}: {durations} on {gpu}, and {verdict}: NeMo-RL starts in {START:.0f} s or more, "
            f"and {stop}; give more time or GPUs, or see nemo-grpo plan"
        )
    # Plus one, because the run finishes the step during which the signal arrives.
    steps_until_signal = 1 + int((seconds - START - lead) / step)
    steps = max(min(forecast.steps_within(seconds - START), steps_until_signal), 1)
    total = forecast.work.num_steps
    return True, (
        f"--time {limit}: about {min(steps, total)} of {total} steps of {step:.0f} s fit; NeMo-RL starts in "
        f"{START:.0f} s or more, and {stop}"
    )


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Estimate an upper bound of a checkpoint's bytes as if all weights were trained, also with LoRA.

    The number of parameters comes from the files of policy.model_name, at 2 bytes per parameter, or else from
    the planner's table. Returns None if neither knows the model.
    """
    bytes_per_parameter = BYTES_OF_WEIGHT
    if recipe.checkpointing.save_optimizer:
        bytes_per_parameter += BYTES_OF_OPTIMIZER
    model_folder = Path(recipe.policy.model_name or "/nonexistent")
    weight_files = list(model_folder.glob("*.safetensors"))
    if weight_files:
        num_parameters = sum(file.stat().st_size for file in weight_files) // BYTES_OF_WEIGHT
        return num_parameters * bytes_per_parameter
    try:
        return plan_recipe(recipe).num_parameters * bytes_per_parameter
    except UserError:
        return None


def kind_of(name: str) -> str | None:
    """Find the planner's name for a GPU that the driver calls ``name``, or return None if it has none.

    The planner's A100 has 80 GB, so an A100 of 40 GB has no name here.
    """
    lower_name = name.lower()
    if "40gb" in lower_name:
        return None
    # The longest match, because the name of a GB200 also contains B200.
    kinds = [kind for kind in HARDWARE if kind in lower_name]
    return max(kinds, key=len, default=None)
