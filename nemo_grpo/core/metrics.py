"""Metrics of a whole step as 0-d tensors, so that a step costs one copy to the host."""

from nemo_grpo.core.advantages import GroupAdvantages
from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor
from nemo_grpo.core.statistics import percentiles, row_std, token_mean, token_std
from nemo_grpo.core.surrogates import MAX_LOG_RATIO
from nemo_grpo.core.token_weights import step_covariance

COVARIANCE_SHARES = {f"p{100 * share:g}": share for share in (0.0001, 0.01, 0.2, 0.5, 0.8, 0.99, 0.9999)}
"""Percentiles of a step's covariances, by name (CW-GRPO Table 1)."""


def step_metrics(batch: TokenBatch, advantages: Tensor, base: GroupAdvantages) -> dict[str, Tensor]:
    """Reward, advantage, length, covariance and mismatch statistics of a whole step.

    Args:    batch: the whole step, clean.
             advantages: [B, T], as the variant shaped them: ``advantage/*``.
             base: the group advantages before any shaping, so that ``covariance/*`` compares variants.
    Returns: name -> 0-d tensor. ``covariance/*`` are percentiles of `step_covariance` (CW-GRPO Table 1);
             ``mismatch/*`` compare the scoring policy with the sampler. They and ``entropy/mean`` are taken
             over the rows that the policy scored.
    """
    mask, scored, valid, rewards = batch.mask, batch.scored_mask, batch.sample_mask, batch.rewards.double()
    num_valid, rewarded = valid.sum().clamp(min=1), batch.in_groups
    num_groups = (base.groups.sum(rewarded) > 0).sum().clamp(min=1)
    lengths = mask.sum(1)
    covariance = step_covariance(batch.prev_logprobs, base.per_token(mask), mask)
    drift = batch.prev_logprobs - batch.generation_logprobs
    bounded = drift.clamp(max=MAX_LOG_RATIO)
    metrics = {
        "reward/mean": rewards.sum() / rewarded.sum().clamp(min=1),
        "reward/std": row_std(rewards, rewarded),
        "reward/group_std": base.groups.std(rewards, rewarded).sum() / num_groups,  # GPG Figure 2
        "groups/valid_fraction": base.has_signal.sum() / num_valid,
        "length/mean": lengths.sum() / num_valid,
        "length/max": lengths.max() if lengths.numel() else lengths.sum(),
        "advantage/mean": token_mean(advantages, mask),
        "advantage/std": token_std(advantages, mask),
        "advantage/abs_max": advantages.abs().max() if advantages.numel() else advantages.sum(),
        "covariance/mean": token_mean(covariance, mask),
        "mismatch/logprob_abs_mean": token_mean(drift.abs(), scored),
        "mismatch/kl": token_mean(bounded.expm1() - bounded, scored),
        "logprob/mean": token_mean(batch.prev_logprobs, mask),
    }
    values = percentiles(covariance.masked_select(mask), tuple(COVARIANCE_SHARES.values()))
    metrics |= {f"covariance/{name}": value for name, value in zip(COVARIANCE_SHARES, values, strict=True)}
    if batch.entropies is not None:
        metrics["entropy/mean"] = token_mean(batch.entropies, scored)
    if batch.reference_policy_logprobs is not None:
        metrics["kl/step_start"] = token_mean(batch.prev_logprobs - batch.reference_policy_logprobs, mask)
    return metrics
