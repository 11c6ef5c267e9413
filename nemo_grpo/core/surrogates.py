"""Policy surrogates: per-token objectives, to be maximised."""

from nemo_grpo.core.lazy import Tensor, torch

MAX_LOG_RATIO = 20.0
"""Nats at which log-ratios are clamped, value and gradient.

exp(20) is 5e8. exp(89) is infinite in float32; the loss then is infinite or NaN even where a clip would
bound it."""


def importance_ratio(next_token_logprobs: Tensor, prev_logprobs: Tensor) -> Tensor:
    """Compute rho = exp(logp - logp_prev), [B, T]; the exponent is clamped at `MAX_LOG_RATIO`."""
    log_ratio = next_token_logprobs - prev_logprobs
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_importance_ratio(next_token_logprobs: Tensor, prev_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Compute rho_i = exp(mean_t(logp - logp_prev)): one ratio per response, repeated at all its tokens.

    Implements GSPO (2507.18071) Eq. 7.

    Args:
        next_token_logprobs: [B, T], nats; the current policy, with gradient.
        prev_logprobs: [B, T], nats; the policy that scored the rollout.
        mask: [B, T] bool.
    Returns: [B, T]; the gradient reaches every token of the response. The mean is clamped at `MAX_LOG_RATIO`.
    """
    log_ratio = torch.where(mask, next_token_logprobs - prev_logprobs, 0.0)
    num_tokens = mask.sum(1, keepdim=True).clamp(min=1)
    mean = log_ratio.sum(1, keepdim=True) / num_tokens
    ratio = torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio.expand_as(log_ratio)


def clipped_policy_gradient(
    ratio: Tensor,
    advantages: Tensor,
    ratio_clip_min: float,
    ratio_clip_max: float,
    ratio_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped objective, with an optional dual clip.

    objective = min(rho A, clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max) A)   Schulman et al. 2017, Eq. 7
    objective = max(objective, ratio_clip_c A)  where A < 0                       Ye et al. 2020, Eq. 5

    Args:
        ratio: [B, T], with gradient.
        advantages: [B, T].
        ratio_clip_min: distance of the lower bound from 1.
        ratio_clip_max: distance of the upper bound from 1.
        ratio_clip_c: factor of the dual clip, > 1; None: no dual clip.
    Returns: (objective, is_clipped), both [B, T]. ``is_clipped`` is 1 at the tokens whose gradient a clip
        removes, else 0, and has no gradient itself.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - ratio_clip_min, 1 + ratio_clip_max) * advantages
    objective = torch.minimum(unclipped, clipped)
    if ratio_clip_c is not None:
        floor = ratio_clip_c * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    is_clipped = objective.detach() != unclipped.detach()
    return objective, is_clipped.to(ratio.dtype)


def reinforce(next_token_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Compute logp A, [B, T]: the plain policy gradient (Williams 1992; GPG Eq. 5)."""
    return next_token_logprobs * advantages
