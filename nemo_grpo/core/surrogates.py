"""Policy surrogates: per-token objectives, to be maximised."""

from nemo_grpo.core.lazy import Tensor, torch

MAX_LOG_RATIO = 20.0
"""Nats at which log-ratios are clamped, value and gradient.

exp(20) is 5e8. exp(89) is infinite in float32; the loss then is infinite or NaN even where a clip would
bound it."""


def importance_ratio(next_token_logprobs: Tensor, prev_logprobs: Tensor) -> Tensor:
    """rho = exp(logp - logp_prev), [B, T]; the exponent is clamped at `MAX_LOG_RATIO`."""
    return torch.exp((next_token_logprobs - prev_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_importance_ratio(next_token_logprobs: Tensor, prev_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho_i = exp(mean_t(logp - logp_prev)), one ratio per response, at each of its tokens.

    Implements GSPO (2507.18071) Eq. 7.

    Args:    next_token_logprobs, prev_logprobs: [B, T], nats.  mask: [B, T] bool.
    Returns: [B, T]; the gradient reaches every token of the response. The mean is clamped at `MAX_LOG_RATIO`.
    """
    drift = torch.where(mask, next_token_logprobs - prev_logprobs, 0.0)
    mean = drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expand_as(drift)


def clipped_policy_gradient(
    ratio: Tensor,
    advantages: Tensor,
    ratio_clip_min: float,
    ratio_clip_max: float,
    ratio_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped objective, with an optional dual clip.

    min(rho A, clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max) A);  where A < 0 not below ratio_clip_c A
    (Schulman et al. 2017 Eq. 7; dual clip: Ye et al. 2020 Eq. 5)

    Args:    ratio, advantages: [B, T].  ratio_clip_min/max: distances from 1.  ratio_clip_c: > 1, or None.
    Returns: [B, T]; and 1 at the tokens whose gradient a clip removes, else 0, [B, T] without gradient.
    """
    unclipped = ratio * advantages
    with torch.no_grad():
        clipped = ratio.clamp(1 - ratio_clip_min, 1 + ratio_clip_max) * advantages
        value = torch.minimum(unclipped, clipped)
        if ratio_clip_c is not None:  # the bound is 0 where A >= 0, and the value is not below 0 there
            value = torch.maximum(value, advantages.clamp(max=0) * ratio_clip_c)
        is_clipped = value != unclipped
    return torch.where(is_clipped, value, unclipped), is_clipped.to(ratio.dtype)


def reinforce(next_token_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """logp A: the plain policy gradient (Williams 1992; GPG Eq. 5)."""
    return next_token_logprobs * advantages
