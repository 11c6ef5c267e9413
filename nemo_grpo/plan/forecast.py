"""Forecast of a cluster recipe: time of a step and of the run, bottleneck, cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.hardware import OTHER, PUBLISHED, Hardware, PredictionError
from nemo_grpo.plan.inputs import PlanInput, plan_input
from nemo_grpo.plan.lengths import PROMPT, Lengths, of_mean, read_lengths
from nemo_grpo.plan.scenario import ACCEPTANCE, SIGNAL, Scenario, Workload, workload_of
from nemo_grpo.plan.step_time import ROLLOUT, UPDATE, StepTime, step_time
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

MEAN_SHARE = 0.5
"""Mean length of a response as a share of the longest, if not stated."""

_WORDS = {
    "prefill": "prompts",
    "decode": "decoding",
    "tail": "the longest responses",
    "forward and backward": "the update",
    "pipeline bubble": "the pipeline's bubble",
    "gradients": "reducing gradients",
    "refit": "handing weights to vLLM",
    "swaps to the host": "moving weights and optimizer state to the host",
    "rewards, data, logs": "work outside the GPUs",
}
"""Phase -> its words in a sentence; the others keep their names."""


@dataclass(frozen=True)
class Assumptions:
    """Properties of a run that its recipe does not state.

    Attributes: lengths: mean length of the responses, or a run's file of lengths; None: half of the longest.
                prompt: mean tokens of a prompt.  signal: share of groups whose rewards differ.
                acceptance: probability of a drafted token after accepted ones.
    """

    lengths: float | Path | None = None
    prompt: float = PROMPT
    signal: float = SIGNAL
    acceptance: float = ACCEPTANCE

    def lengths_of(self, recipe: Recipe) -> Lengths:
        """Return the lengths of a recipe's responses."""
        limit, context = recipe.policy.generation.max_new_tokens, recipe.policy.max_total_sequence_length
        prompt = min(PROMPT, context - 1) if self.prompt == PROMPT else self.prompt
        if not 1 <= prompt < context:
            raise UserError(
                f"--prompt-length {prompt:g}: a prompt has at least 1 token, and fewer than "
                f"policy.max_total_sequence_length={context}; give their mean"
            )
        if isinstance(self.lengths, Path):
            return read_lengths(self.lengths, limit, prompt)
        if self.lengths is None:
            return of_mean(MEAN_SHARE * limit, limit, prompt, f"assumed: half of {limit}")
        return of_mean(self.lengths, limit, prompt)

    def work_of(self, recipe: Recipe) -> Workload:
        """Compute the work of one step of the recipe."""
        if not 0 < self.signal <= 1:
            raise UserError(f"--signal {self.signal:g}: a share of groups above 0 and up to 1")
        if not 0 <= self.acceptance <= 1:
            raise UserError(f"--acceptance {self.acceptance:g}: a share of drafted tokens from 0 to 1")
        return workload_of(recipe, self.lengths_of(recipe), self.signal, self.acceptance)


@dataclass(frozen=True)
class Forecast:
    """A recipe's time on one kind of GPU, and the prediction's error there."""

    step: StepTime
    error: PredictionError

    @property
    def scenario(self) -> Scenario:
        return self.step.scenario

    @property
    def setup(self) -> PlanInput:
        return self.scenario.setup

    @property
    def work(self) -> Workload:
        return self.scenario.work

    @property
    def run_seconds(self) -> float:
        """Seconds of steps, validations and checkpoints, without the start of a job."""
        step, work = self.step, self.work
        validations = work.num_steps // work.val_period if work.val_period else 0
        saves = -(-work.num_steps // work.save_period) if work.save_period else 0
        return work.num_steps * step.seconds + validations * step.validation + saves * step.checkpoint

    @property
    def gpu_hours(self) -> float:
        return self.run_seconds * self.step.num_gpus / 3600

    def of_steps(self, num_steps: int) -> Forecast:
        """Forecast a run that ends after this number of steps, whatever its data."""
        work = replace(self.work, num_steps=num_steps, or_passes="")
        scenario = replace(self.scenario, work=work)
        return replace(self, step=replace(self.step, scenario=scenario))

    @property
    def bottleneck(self) -> str:
        """Largest phase of the slower side, its share, and remedies."""
        phases = self.step.phases
        if self.step.age and self.step.training >= self.step.seconds:
            phases = {name: seconds for name, seconds in phases.items() if name not in ROLLOUT}
        elif self.step.age:
            phases = {name: phases[name] for name in ROLLOUT}
        name = max(phases, key=lambda name: phases[name])
        side = f" of the {'rollouts' if name in ROLLOUT else 'training side'}" if self.step.age else ""
        share, remedy = phases[name] / sum(phases.values()), for_time(name, self.setup, self.work)
        return f"{share:.0%}{side} is {_WORDS.get(name, name)}; {remedy}"

    def steps_within(self, seconds: float) -> int:
        """Count the steps that fit in a time, with one checkpoint at the end if the run saves any."""
        save = self.step.checkpoint if self.work.save_period else 0.0
        return max(int((seconds - save) / self.step.seconds), 0)


def for_time(phase: str, setup: PlanInput, work: Workload) -> str:
    """Name remedies that shorten a phase of the step and are not in use."""
    layout = setup.layout
    remedies = {
        "decode": {
            "use more GPUs": True,
            "FP8 rollouts": not setup.vllm_fp8,
            "another tensor_parallel_size of vLLM": True,
        },
        "tail": {
            "lower policy.generation.max_new_tokens": True,
            "let rollouts run ahead (grpo.async_grpo)": not work.trajectory_age,
        },
        "scoring": {
            "raise policy.logprob_batch_size": True,
            "leave out the KL penalty": setup.has_penalty,
        },
        "forward and backward": {
            "use more GPUs": True,
            "another layout (--best)": True,
            "no recomputation": bool(setup.recompute),
        },
        "pipeline bubble": {"use fewer stages": True, "more sequences per update": True},
        "gradients": {"use a larger policy.train_global_batch_size": True},
        "optimizer": {"use more GPUs": True, "no optimizer_cpu_offload": setup.offload_fraction > 0},
        "refit": {
            "use larger steps": True,
            "fewer stages": layout.pipeline > 1,
            "fewer expert ranks": layout.expert > 1,
        },
        "swaps to the host": {"use more GPUs": True},
        "rewards, data, logs": {"use larger steps": True},
    }
    still_open = (text for text, is_open in remedies.get(phase, {}).items() if is_open)
    return ", or ".join(still_open) or "nothing to gain"


def forecast(
    recipe: Recipe, shape: ModelSpec, gpu: str, hardware: Hardware, assumed: Assumptions
) -> Forecast:
    """Forecast a cluster recipe's time.  Args: gpu: a name, for the prediction's error there."""
    scenario = Scenario(shape, plan_input(recipe), assumed.work_of(recipe), hardware)
    return Forecast(step_time(scenario), PUBLISHED.get(gpu, OTHER))


def at_scale(base: Forecast, num_gpus: int, *, weak: bool = False) -> Forecast:
    """Forecast the same layout on another number of GPUs, whether it divides them or not.

    Args:   weak: the batch grows with the GPUs.
    """
    setup, work = base.setup, base.work
    before = setup.num_nodes * setup.gpus_per_node
    per_node = min(setup.gpus_per_node, num_gpus)
    if num_gpus % per_node:
        raise UserError(
            f"--scale {num_gpus}: not whole nodes of {per_node} GPUs; use multiples of {per_node}"
        )
    rollout = setup.num_rollout_gpus * num_gpus // before
    if num_gpus > per_node:
        rollout -= rollout % per_node
    setup = replace(setup, num_nodes=num_gpus // per_node, gpus_per_node=per_node, num_rollout_gpus=rollout)
    if weak:
        groups = max(round(work.num_samples / work.group_size * num_gpus / before), 1)
        work = replace(work, num_samples=groups * work.group_size)
    return replace(base, step=step_time(replace(base.scenario, setup=setup, work=work)))


def of_layout(base: Forecast, setup: PlanInput) -> Forecast:
    """Forecast the same step with another layout."""
    return replace(base, step=step_time(replace(base.scenario, setup=setup)))


def as_dict(found: Forecast, price: float | None = None) -> dict[str, object]:
    """Convert a forecast to JSON's types: seconds, tokens, GPU-hours, dollars.

    Time and cost of a run that ends with NeMo-RL's own data are None: its number of steps is not known.
    """
    step, work = found.step, found.work
    ends_with_data = bool(work.or_passes)  # after steps that the recipe does not say
    run_seconds = None if ends_with_data else found.run_seconds
    gpu_hours = None if ends_with_data else found.gpu_hours
    return {
        "step_seconds": step.seconds,
        "phases": step.phases,
        "rollouts_run_ahead": step.age,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "update_mfu": step.mfu,
        "update_seconds": sum(step.phases[name] for name in UPDATE),
        "validation_seconds": step.validation,
        "checkpoint_seconds": step.checkpoint,
        "run_seconds": run_seconds,
        "gpu_hours": gpu_hours,
        "dollars": None if price is None or gpu_hours is None else gpu_hours * price,
        "bottleneck": found.bottleneck,
        "interval": {
            "step_seconds": found.error.around(step.seconds),
            "run_seconds": None if run_seconds is None else found.error.around(run_seconds),
            "covered": found.error.covered,
            "of": f"{found.error.num_steps} {found.error.what}",
        },
        "error": {"median": found.error.median, "worst": found.error.worst},
        "mean_response": work.lengths.mean,
        "lengths": work.lengths.source,
        "draws": work.num_draws,
        "scoring_passes": work.scoring_passes,
        "draft_tokens": found.setup.draft_tokens,
        "acceptance": work.acceptance if found.setup.draft_tokens else None,
    }
