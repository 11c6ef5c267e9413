"""Work of one step: samples, lengths, passes, draws, and what comes beside the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_grpo.plan.lengths import Lengths

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

SIGNAL = 0.5
"""Share of groups whose rewards differ, where no run states it: how often prompts are drawn again."""

ACCEPTANCE = 0.87
"""Acceptance of a drafted token after accepted ones, if no run states it: SkyRL's MTP run of Qwen3.5-9B
has 0.886, 0.869 and 0.861 at its three depths (docs/examples/spec_decode.mdx)."""


@dataclass(frozen=True)
class Workload:
    """One step, and the run around it.

    Attributes: num_samples: responses that are trained.  group_size: responses that share a prompt.
                num_updates, scoring_passes: optimizer updates per step, and forward passes before them.
                num_draws: times that num_samples responses are sampled, on average, for one step.
                trajectory_age: steps that rollouts may run ahead of training; 0: they take turns.
                waits_for_rollouts: those that run ahead have to end before the engines get new weights.
                acceptance: probability of a drafted token whose predecessors were accepted.
                val_samples: responses sampled every val_period steps.  or_passes: see `Recipe`.
                save_period: steps between checkpoints; 0: none.  saves_optimizer: with optimizer state.
    """

    num_samples: int
    group_size: int
    num_updates: int
    lengths: Lengths
    scoring_passes: int
    num_draws: float = 1.0
    trajectory_age: int = 0
    waits_for_rollouts: bool = False
    acceptance: float = ACCEPTANCE
    num_steps: int = 1
    or_passes: str = ""
    val_period: int = 0
    val_samples: int = 0
    save_period: int = 0
    saves_optimizer: bool = True

    @property
    def tokens(self) -> float:
        return self.num_samples * self.lengths.mean_sequence


def workload_of(
    recipe: Recipe, lengths: Lengths, signal: float = SIGNAL, acceptance: float = ACCEPTANCE
) -> Workload:
    """The planner's view of a recipe's loop.

    Args: signal: share of groups whose rewards differ.  acceptance: of drafted tokens.
    """
    grpo, vllm = recipe.grpo, recipe.policy.generation.vllm_cfg
    ahead, num_draws = grpo.async_grpo, 1.0
    if grpo.use_dynamic_sampling:
        threshold, most = recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
        num_draws = expected_draws(signal, threshold, most, grpo.num_prompts_per_step)
    in_flight = vllm.async_engine and ahead is not None and ahead.in_flight_weight_updates
    return Workload(
        num_samples=recipe.num_sequences_per_step,
        group_size=grpo.num_generations_per_prompt,
        num_updates=max(recipe.num_updates_per_step, 1),
        lengths=lengths,
        scoring_passes=scoring_passes(recipe),
        num_draws=num_draws,
        trajectory_age=recipe.rollouts_ahead,
        waits_for_rollouts=not (in_flight or recipe.has_single_controller),
        acceptance=acceptance,
        num_steps=grpo.max_num_steps,
        or_passes=recipe.or_passes,
        val_period=max(grpo.val_period, 0),
        val_samples=(grpo.max_val_samples or 0) * grpo.val_num_generations_per_prompt,
        save_period=recipe.checkpointing.save_period if recipe.checkpointing.enabled else 0,
        saves_optimizer=recipe.checkpointing.save_optimizer,
    )


def scoring_passes(recipe: Recipe) -> int:
    """Forward passes over a step before its updates.

    One for the policy's logprobs (entropies come with it), one for the reference policy's if the variant
    compares with it. NeMo-RL leaves the first out with force_on_policy_ratio, unless it masks sequences by
    their logprobs' error.
    """
    return int(recipe.policy_is_scored) + int(recipe.loss_fn.needs_reference)


def expected_draws(signal: float, threshold: float, max_draws: int, num_groups: int) -> float:
    """Draws of num_groups prompts until threshold x num_groups groups carry signal.

    Implements the expectation of `core.resampling.accumulate_groups`: after n draws the number of groups
    with signal is binomial(n B, p), so E[draws] = 1 + sum_n P(fewer than the threshold after n draws). The
    binomial is taken as normal, with a continuity correction.
    """
    from statistics import NormalDist

    need, expected = threshold * num_groups, 1.0
    for draws in range(1, max_draws):
        mean = draws * num_groups * signal
        spread = (mean * (1 - signal)) ** 0.5
        missed = NormalDist(mean, spread).cdf(need - 0.5) if spread else float(mean < need)
        expected += missed
        if missed < 1e-6:
            break
    return expected
