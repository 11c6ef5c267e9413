"""Weights and masks per token, without gradient: covariance kernels and probability shaping."""

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
    """c_it = (logp_it - mean_step logp)(A_it - mean_step A)  (2505.22617 Eq. 10); [B, T], 0 off the mask."""
    return (token_centred(logprobs, mask) * token_centred(advantages, mask)).to(logprobs.dtype)


def group_covariance(
    logprobs: Tensor, advantages: Tensor, batch: TokenBatch, groups: Groups, centring: Centring
) -> Tensor:
    """c_it = (logp_it - mean logp)(A_i - mean_g A)  (CW-GRPO section 2.3); [B, T], 0 off the mask.

    Args: logprobs: [B, T].  advantages: [B], per sequence; its mean is over the group's rewarded responses.
          centring: "response" subtracts each response's own mean logprob, "group" the mean over the group's
              tokens, "none" nothing: an ablation, no covariance.
    """
    mask = batch.mask
    if centring == "response":
        centred = row_centred(logprobs, mask)
    elif centring == "none":
        centred = logprobs.double()
    else:
        centred = group_token_centred(logprobs, mask, groups)
    c = centred * groups.centred(advantages, batch.in_groups)[:, None]
    return zero_outside(c, mask).to(logprobs.dtype)


def gaussian_kernel_weights(covariance: Tensor, mask: Tensor, groups: Groups, scope: Scope) -> Tensor:
    """Down-weight tokens of extreme covariance, keeping the mean weight at 1.

    Implements CW-GRPO section 2.3:  w = exp(-c^2 / (2 sigma^2)),  w~ = w N / sum w,  sigma = std(c) with ddof
    0

    Args:    covariance, mask: [B, T].  scope: sigma, N and the sum over the token's group, or over the whole
             step.
    Returns: [B, T]; 1 where sigma is 0; 0 off the mask.
    """
    if scope == "group":
        sigma = groups.spread(group_token_std(covariance, mask, groups))[:, None]
    else:
        sigma = token_std(covariance, mask).expand(mask.shape[0], 1)
    has_spread = sigma > 0
    scaled = covariance.double() / torch.where(has_spread, sigma, 1.0)
    w = torch.where(mask, torch.exp(-scaled.square() / 2), 0.0)
    if scope == "group":
        mean = groups.spread(group_token_mean(w, mask, groups))[:, None]
    else:
        mean = token_mean(w, mask)
    w = torch.where(has_spread, w / torch.where(mean > 0, mean, 1.0), 1.0)
    return torch.where(mask, w, 0.0).to(covariance.dtype)


def select_high_covariance(
    covariance: Tensor,
    batch: TokenBatch,
    covariance_min: float,
    covariance_max: float,
    clip_fraction: float,
    seed: int,
) -> Tensor:
    """[B, T] bool: floor(clip_fraction N) tokens, at least one, drawn from those with min < c < max.

    Implements Clip-Cov (Cui et al. 2505.22617 Eq. 11-12). The choice goes by `token_uniforms`, so it does not
    depend on row order, padding or microbatching.
    """
    mask = batch.mask
    qualified = mask & (covariance > covariance_min) & (covariance < covariance_max)
    num_chosen = torch.minimum((clip_fraction * mask.sum()).floor().clamp(min=1), qualified.sum())
    keys = torch.where(qualified, token_uniforms(batch, seed), 2.0).flatten()
    rank = torch.empty_like(keys, dtype=torch.int64)
    rank[keys.argsort()] = torch.arange(keys.numel(), device=keys.device)
    return (rank < num_chosen).view_as(mask)


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

    Implements TR-GRPO Eq. 12:  w = clip(alpha (sigmoid(tau pi) - mu), L, U),  pi = exp(logp)

    Args:    next_token_logprobs: [B, T], nats.  multiply: tau pi (ours); False: pi / tau (as printed).
    Returns: [B, T], within [lower, upper].
    """
    pi = next_token_logprobs.detach().exp()
    shaped = (pi.mul_(tau) if multiply else pi.div_(tau)).sigmoid_()
    return shaped.sub_(mu).mul_(alpha).clamp_(lower, upper)
