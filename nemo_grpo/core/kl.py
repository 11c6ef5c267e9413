"""Per-token estimators of KL(policy || reference) from the sampled token's logprobs."""

from typing import Literal

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.surrogates import MAX_LOG_RATIO

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(
    next_token_logprobs: Tensor, reference_policy_logprobs: Tensor, kind: KLType = "k3"
) -> Tensor:
    """Estimate the divergence from the reference policy.

    With d = logp_ref - logp:   k1 = -d,   k2 = d^2 / 2,   k3 = exp(d) - d - 1   (Schulman 2020)
    In k3 d is clamped from above at `MAX_LOG_RATIO`, without gradient there.

    Args:
        next_token_logprobs: [B, T], nats; the current policy, with gradient.
        reference_policy_logprobs: [B, T], nats.
        kind: the estimator.
    Returns: [B, T]; its gradient is these formulas' plain derivative by next_token_logprobs
             (`with_score_function` adds the other part).
    """
    d = reference_policy_logprobs - next_token_logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return _exp_minus_linear(d)


def weighted_k3(
    next_token_logprobs: Tensor, reference_policy_logprobs: Tensor, token_weights: Tensor
) -> Tensor:
    """Compute k3 with the weight in the ratio: x - log x - 1, x = w exp(logp_ref - logp)  (TR-GRPO Eq. 11).

    It is not 0 at logp = logp_ref unless w = 1: there it is w - log w - 1. Its minimum lies at pi = w pi_ref.

    Args:
        next_token_logprobs: [B, T], nats; the current policy, with gradient.
        reference_policy_logprobs: [B, T], nats.
        token_weights: [B, T], > 0.
    Returns: [B, T].
    """
    log_x = torch.log(token_weights) + reference_policy_logprobs - next_token_logprobs
    return _exp_minus_linear(log_x)


def with_score_function(kl: Tensor, next_token_logprobs: Tensor) -> Tensor:
    """Add the score-function term to the gradient of a KL estimate; its values stay.

    kl exp(logp - sg(logp)):  d/dlogp = kl' + kl      (2506.09477; NeMo-RL's stock loss always does this)

    Args:
        kl: [B, T], with gradient.
        next_token_logprobs: [B, T], nats; the current policy, with gradient.
    Returns: [B, T].
    """
    ratio_of_one = torch.exp(next_token_logprobs - next_token_logprobs.detach())
    return kl * ratio_of_one


def _exp_minus_linear(x: Tensor) -> Tensor:
    """Compute exp(x) - x - 1, which is k3 of the log-ratio x."""
    # Only from above: far below 0 the value is -x - 1, which cannot overflow.
    x = x.clamp(max=MAX_LOG_RATIO)
    # expm1 is accurate near 0, where policy and reference agree and exp(x) - 1 would cancel.
    return torch.expm1(x) - x
