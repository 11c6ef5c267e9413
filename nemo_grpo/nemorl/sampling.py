"""Replacement for NeMo-RL's `dynamic_sampling`, with its signature: it selects the groups of a step.

NeMo-RL keeps single rows by a floating-point std, which mistakes rounding for signal and, with a
leave-one-out baseline, drops the only correct response of a group. Here a whole group is kept if the rewards
of its trained responses differ. Responses to truncated prompts do not train, nor do truncated responses under
overlong filtering. `core.resampling` decides when a step is full, for DAPO and for GPG's threshold.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.core.objective import reward_metrics
from nemo_grpo.core.resampling import Accumulation, has_signal
from nemo_grpo.core.statistics import Groups
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.support.dotted import value_of
from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

Sampled = tuple[Any, bool, Any, dict[str, Any]]


def dynamic_sampling_for(config: VariantConfig, context: StepContext) -> Callable[..., Sampled]:
    """Make the replacement for ``nemo_rl.algorithms.grpo.dynamic_sampling``.

    Args:
        config: the variant; its `resampling` sets the share of groups with signal and the maximum draws.
        context: the trainer logs its ``metrics`` with the step.
    """

    # [B] of each draw of the current step; the first draw of the next step clears it.
    rewards_of_draws: list[Tensor] = []

    def finish(gathered: Accumulation[Any], batch_type: Any, num_groups: int, num_generations: int) -> Any:
        """Return the step's rows, and put its metrics into the context."""
        step = batch_type.from_batches(list(gathered.take(num_groups)))
        # The trainer trains on filtered_reward, the kept groups, and logs total_reward, all draws.
        step["filtered_reward"] = step["total_reward"]
        rewards = torch.cat(rewards_of_draws)
        step["total_reward"] = rewards
        context.metrics |= _reward_metrics(rewards, num_generations)
        num_discarded_groups = max(len(gathered.valid) - num_groups, 0)
        context.metrics["dynamic_sampling_num_discarded_valid_samples"] = [
            float(num_discarded_groups * num_generations)
        ]
        return step

    def dynamic_sampling(
        repeated_batch: Any,
        std: Tensor,
        baseline: Tensor,
        dynamic_sampling_num_gen_batches: int,
        master_config: Any,
        timer: Any,
        batch_cache: Accumulation[Any] | None = None,
    ) -> Sampled:
        """Select the groups of a draw, as the trainer calls it.

        Returns:
            The step's rows; True if the step is full; the groups gathered so far, which the trainer passes
            unread to the next draw as ``batch_cache``; metrics.
        """
        context.metrics = {}
        repeated_batch["baseline"] = baseline
        repeated_batch["std"] = std
        grpo = value_of(master_config, "grpo")
        if not value_of(grpo, "use_dynamic_sampling", False):
            return repeated_batch, True, batch_cache, context.metrics
        num_groups = value_of(grpo, "num_prompts_per_step")
        num_generations = value_of(grpo, "num_generations_per_prompt")
        most_draws = value_of(grpo, "dynamic_sampling_max_gen_batches")
        is_valid = partial(_has_signal, drop_truncated=value_of(grpo, "overlong_filtering", False))
        if batch_cache is None:
            rewards_of_draws.clear()
        rewards_of_draws.append(repeated_batch["total_reward"])
        with timer.time("dynamic_sampling"):
            draw = _groups(repeated_batch, num_generations)
            previous: Accumulation[Any] = Accumulation() if batch_cache is None else batch_cache
            gathered = previous.add(draw, is_valid)
            threshold, max_draws = config.resampling(most_draws)
            is_full = gathered.is_complete(num_groups, threshold, max_draws)
            log.info(
                "draw %d: %d of %d groups with signal, %s of %d wanted%s",
                dynamic_sampling_num_gen_batches,
                sum(map(is_valid, draw)),
                len(draw),
                len(gathered.valid),
                num_groups,
                "" if is_full else "; drawing again",
            )
            if not is_full:
                # NeMo-RL's trainer reads it before the next draw.
                repeated_batch["filtered_reward"] = repeated_batch["total_reward"]
                return repeated_batch, False, gathered, context.metrics
            step = finish(gathered, type(repeated_batch), num_groups, num_generations)
        return step, True, gathered, context.metrics

    return dynamic_sampling


def _reward_metrics(rewards: Tensor, num_generations: int) -> dict[str, list[float]]:
    """Compute ``reward/*`` of all draws of a step.

    Args:
        rewards: [B], a group's rows adjacent.
        num_generations: G, rows in a group.
    """
    groups = Groups.from_ids(torch.arange(len(rewards)) // num_generations)
    metrics = reward_metrics(rewards.cpu(), rewards.isfinite().cpu(), groups)
    return {name: [float(value)] for name, value in metrics.items()}


def _groups(batch: Any, num_generations: int) -> list[Any]:
    """Split a draw into batches of a prompt's responses; NeMo-RL keeps a prompt's rows together."""
    rows = torch.arange(batch.size).split(num_generations)
    return [batch.select_indices(group.tolist()) for group in rows]


def _has_signal(group: Any, drop_truncated: bool) -> bool:
    """Apply `core.resampling.has_signal` to a group's columns in NeMo-RL's batch."""
    # NeMo-RL keeps the rewards from before its length penalty only where it shapes them.
    is_shaped = "unshaped_total_reward" in group
    rewards = group["unshaped_total_reward"] if is_shaped else group["total_reward"]
    is_trained = group["loss_multiplier"] > 0
    if drop_truncated:
        # NeMo-RL sets their loss_multiplier to 0 only after it has sampled.
        is_trained &= ~torch.as_tensor(group["truncated"], dtype=torch.bool)
    return has_signal(rewards.tolist(), is_trained.tolist())
