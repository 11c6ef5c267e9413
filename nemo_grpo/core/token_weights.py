"""Weights and masks per token, without gradient.

CW-GRPO and Clip-Cov compute them from covariances, TR-GRPO from the tokens' probabilities.
"""

from typing import Literal

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.random import token_uniforms
from nemo_grpo.core.statistics import (
    Groups,
    group_token_centred,
    group_token_mean,
    group_token_std,
    row_centred,
    token_centred,
    token_mean,
    token_std,
    zero_outside,
)

Scope = Literal["group", "batch"]
Centring = Literal["response", "group", "none"]


def step_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute c_it = (logp_it - mean_step logp)(A_it - mean_step A); [B, T], 0 off the mask.

    Implements Clip-Cov (2505.22617) Eq. 10.
    """
    covariance = token_centred(logprobs, mask) * token_centred(advantages, mask)
    return covariance.to(logprobs.dtype)


def group_covariance(
    logprobs: Tensor, advantages: Tensor, batch: TokenBatch, groups: Groups, centring: Centring
) -> Tensor:
    """Compute c_it = (logp_it - mean logp)(A_i - mean_g A); [B, T], 0 off the mask.

    Implements CW-GRPO section 2.3.

    Args:
        logprobs: [B, T], nats.
        advantages: [B], per sequence; the mean is over the group's rewarded responses.
        batch: the whole step, with the masks.
        groups: the groups of its rows.
        centring: "response" subtracts each response's own mean logprob, "group" the mean over the group's
            tokens. "none" subtracts nothing: an ablation, which is no covariance.
    """
    mask = batch.mask
    if centring == "response":
        centred_logprobs = row_centred(logprobs, mask)
    elif centring == "none":
        centred_logprobs = logprobs.double()
    else:
        centred_logprobs = group_token_centred(logprobs, mask, groups)
    centred_advantages = groups.centred(advantages, batch.in_groups)
    covariance = centred_logprobs * centred_advantages[:, None]
    return zero_outside(covariance, mask).to(logprobs.dtype)


def gaussian_kernel_weights(covariance: Tensor, mask: Tensor, groups: Groups, scope: Scope) -> Tensor:
    """Down-weight tokens of extreme covariance, keeping the mean weight at 1.

    Implements CW-GRPO section 2.3:
        sigma = std(c), ddof 0
        w     = exp(-c^2 / (2 sigma^2))
        w~    = w N / sum w

    Args:
        covariance: [B, T].
        mask: [B, T] bool.
        groups: the groups of the B rows.
        scope: sigma, N and the sum are over the token's group, or over the whole step ("batch").
    Returns: [B, T]; 1 where sigma is 0; 0 off the mask.
    """
    if scope == "group":
        sigma = groups.spread(group_token_std(covariance, mask, groups))[:, None]
    else:
        sigma = token_std(covariance, mask).expand(mask.shape[0], 1)
    # A group of equal rewards has covariance 0 everywhere, so sigma 0; its tokens keep weight 1.
    has_spread = sigma > 0
    scaled = covariance.double() / torch.where(has_spread, sigma, 1.0)
    w = torch.where(mask, torch.exp(-scaled.square() / 2), 0.0)
    # N / sum w is 1 / mean w.
    if scope == "group":
        mean = groups.spread(group_token_mean(w, mask, groups))[:, None]
    else:
        mean = token_mean(w, mask)
    normalised = w / torch.where(mean > 0, mean, 1.0)
    normalised = torch.where(has_spread, normalised, 1.0)
    return torch.where(mask, normalised, 0.0).to(covariance.dtype)


def select_high_covariance(
    covariance: Tensor,
    batch: TokenBatch,
    covariance_min: float,
    covariance_max: float,
    clip_fraction: float,
    seed: int,
) -> Tensor:
    """Select floor(clip_fraction N) tokens, at least one, uniformly from those with min < c < max.

    Implements Clip-Cov (Cui et al. 2505.22617 Eq. 11-12). The choice goes by `token_uniforms`, so it does not
    depend on row order, padding or microbatching.

    Args:
        covariance: [B, T].
        batch: the whole step.
        covariance_min: lower bound of c, exclusive.
        covariance_max: upper bound of c, exclusive.
        clip_fraction: share of the step's N tokens.
        seed: seed of the step.
    Returns: [B, T] bool. If fewer tokens lie between the bounds, all of these are selected.
    """
    mask = batch.mask
    qualified = mask & (covariance > covariance_min) & (covariance < covariance_max)
    num_to_clip = (clip_fraction * mask.sum()).floor().clamp(min=1)
    num_to_clip = torch.minimum(num_to_clip, qualified.sum())
    # Draws are below 1, so 2 sorts every token that does not qualify behind them.
    sort_keys = torch.where(qualified, token_uniforms(batch, seed), 2.0).flatten()
    rank = torch.empty_like(sort_keys, dtype=torch.int64)
    rank[sort_keys.argsort()] = torch.arange(sort_keys.numel(), device=sort_keys.device)
    return (rank < num_to_clip).view_as(mask)


def probability_weights(
    next_token_logprobs: Tensor,
    *,
    alpha: float,
    mu: float,
    tau: float,
    lower: float,
    upper: float,
    multiply: bool = True,
) -> Tensor:
    """Weight each token by its own probability, without gradient.

    Implements TR-GRPO Eq. 12:  w = clip(alpha (sigmoid(x) - mu), lower, upper),  pi = exp(logp)
                                x = tau pi, or pi / tau as the paper prints it

    Args:
        next_token_logprobs: [B, T], nats.
        alpha: scale.
        mu: offset.
        tau: sharpness of the sigmoid.
        lower: smallest weight.
        upper: largest weight.
        multiply: True: x = tau pi, which fits the paper's constants. False: x = pi / tau.
    Returns: [B, T], within [lower, upper].
    """
    pi = next_token_logprobs.detach().exp()
    x = tau * pi if multiply else pi / tau
    w = alpha * (torch.sigmoid(x) - mu)
    return w.clamp(lower, upper)
