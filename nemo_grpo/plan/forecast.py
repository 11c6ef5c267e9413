"""Forecast of a cluster recipe: time of a step and of the run, bottleneck, cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
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
"""Phase -> its words in a sentence. Phases that are not listed go by their names."""


@dataclass(frozen=True)
class Assumptions:
    """Properties of a run that its recipe does not state.

    Attributes:
        lengths: mean length of the responses, or a run's file of lengths; None: half of the longest.
        prompt: mean tokens of a prompt.
        signal: share of groups whose rewards differ.
        acceptance: probability of a drafted token whose predecessors were accepted.
    """

    lengths: float | Path | None = None
    prompt: float = PROMPT
    signal: float = SIGNAL
    acceptance: float = ACCEPTANCE

    def lengths_of(self, recipe: Recipe) -> Lengths:
        """Return the lengths of a recipe's responses."""
        limit = recipe.policy.generation.max_new_tokens
        context = recipe.policy.max_total_sequence_length
        prompt = self.prompt
        # The default shrinks to fit a short context. A length that the user states is checked instead.
        if prompt == PROMPT:
            prompt = min(PROMPT, context - 1)
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
        """The forecast's scenario."""
        return self.step.scenario

    @property
    def setup(self) -> PlanInput:
        """The scenario's layout and settings."""
        return self.scenario.setup

    @property
    def work(self) -> Workload:
        """The scenario's work per step."""
        return self.scenario.work

    @property
    def run_seconds(self) -> float:
        """Seconds of steps, validations and checkpoints, without the start of a job."""
        step = self.step
        work = self.work
        num_validations = work.num_steps // work.val_period if work.val_period else 0
        # A run also saves after its last step, whatever the period.
        num_checkpoints = ceil(work.num_steps / work.save_period) if work.save_period else 0
        steps = work.num_steps * step.seconds
        return steps + num_validations * step.validation + num_checkpoints * step.checkpoint

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run."""
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
        side = ""
        if self.step.age:
            # Rollouts and training overlap, so only the slower side's phases count.
            training_is_slower = self.step.training >= self.step.seconds
            if training_is_slower:
                phases = {name: seconds for name, seconds in phases.items() if name not in ROLLOUT}
                side = " of the training side"
            else:
                phases = {name: phases[name] for name in ROLLOUT}
                side = " of the rollouts"
        longest = max(phases, key=lambda name: phases[name])
        share = phases[longest] / sum(phases.values())
        remedy = for_time(longest, self.setup, self.work)
        return f"{share:.0%}{side} is {_WORDS.get(longest, longest)}; {remedy}"

    def steps_within(self, seconds: float) -> int:
        """Count the steps that fit in a time, with one checkpoint at the end if the run saves any."""
        checkpoint = self.step.checkpoint if self.work.save_period else 0.0
        return max(int((seconds - checkpoint) / self.step.seconds), 0)


def for_time(phase: str, setup: PlanInput, work: Workload) -> str:
    """Name remedies that shorten a phase of the step, without those that the recipe uses already."""
    layout = setup.layout
    # Phase -> remedy -> whether it is still open.
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
    open_remedies = [remedy for remedy, is_open in remedies.get(phase, {}).items() if is_open]
    if not open_remedies:
        return "nothing to gain"
    return ", or ".join(open_remedies)


def forecast(
    recipe: Recipe, shape: ModelSpec, gpu: str, hardware: Hardware, assumed: Assumptions
) -> Forecast:
    """Forecast a cluster recipe's time.

    Args:
        recipe: the recipe.
        shape: its model.
        gpu: name of the kind of GPU, for the prediction's error there.
        hardware: the kind of GPU.
        assumed: properties that the recipe does not state.
    """
    scenario = Scenario(shape, plan_input(recipe), assumed.work_of(recipe), hardware)
    return Forecast(step_time(scenario), PUBLISHED.get(gpu, OTHER))


def at_scale(base: Forecast, num_gpus: int, *, weak: bool = False) -> Forecast:
    """Forecast the same layout on another number of GPUs, even if it does not divide them.

    Args:
        base: the recipe's forecast.
        num_gpus: GPUs that train and sample.
        weak: True: the batch grows with the GPUs (weak scaling). False: it stays the same.
    """
    setup = base.setup
    work = base.work
    num_gpus_before = setup.num_nodes * setup.gpus_per_node
    gpus_per_node = min(setup.gpus_per_node, num_gpus)
    if num_gpus % gpus_per_node:
        raise UserError(
            f"--scale {num_gpus}: not whole nodes of {gpus_per_node} GPUs; use multiples of {gpus_per_node}"
        )
    # GPUs that only sample keep their share, in whole nodes where there are several.
    num_rollout_gpus = setup.num_rollout_gpus * num_gpus // num_gpus_before
    if num_gpus > gpus_per_node:
        num_rollout_gpus -= num_rollout_gpus % gpus_per_node
    setup = replace(
        setup,
        num_nodes=num_gpus // gpus_per_node,
        gpus_per_node=gpus_per_node,
        num_rollout_gpus=num_rollout_gpus,
    )
    if weak:
        num_groups = work.num_samples / work.group_size
        scaled_groups = max(round(num_groups * num_gpus / num_gpus_before), 1)
        work = replace(work, num_samples=scaled_groups * work.group_size)
    return replace(base, step=step_time(replace(base.scenario, setup=setup, work=work)))


def of_layout(base: Forecast, setup: PlanInput) -> Forecast:
    """Forecast the same step with another layout."""
    return replace(base, step=step_time(replace(base.scenario, setup=setup)))


def as_dict(predicted: Forecast, price: float | None = None) -> dict[str, object]:
    """Convert a forecast to JSON's types: seconds, tokens, GPU-hours, dollars.

    If a run ends when NeMo-RL's own data end, its number of steps is not known: its time and cost are None.

    Args:
        predicted: the forecast.
        price: dollars per GPU-hour.
    """
    step = predicted.step
    work = predicted.work
    error = predicted.error
    run_seconds = None
    run_interval = None
    gpu_hours = None
    dollars = None
    if not work.or_passes:
        run_seconds = predicted.run_seconds
        run_interval = error.around(run_seconds)
        gpu_hours = predicted.gpu_hours
        if price is not None:
            dollars = gpu_hours * price
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
        "dollars": dollars,
        "bottleneck": predicted.bottleneck,
        "interval": {
            "step_seconds": error.around(step.seconds),
            "run_seconds": run_interval,
            "covered": error.covered,
            "of": f"{error.num_steps} {error.what}",
        },
        "error": {"median": error.median, "worst": error.worst},
        "mean_response": work.lengths.mean,
        "lengths": work.lengths.source,
        "draws": work.num_draws,
        "scoring_passes": work.scoring_passes,
        "draft_tokens": predicted.setup.draft_tokens,
        "acceptance": work.acceptance if predicted.setup.draft_tokens else None,
    }
