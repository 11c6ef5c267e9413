"""Clip-Cov: a few tokens of high covariance lose their policy gradient (Cui et al., 2505.22617).

    c_it = (logp_it - mean_step logp)(A_it - mean_step A)             Eq. 10, scoring-time policy, no gradient
    among tokens with covariance_min < c < covariance_max, floor(clip_fraction N) (at least one) are chosen
    uniformly
    term = 0 for the chosen tokens, GRPO's for the others             Eq. 11-12

Deviation: means and token choice are computed once over the whole step; the authors' code computes them per
microbatch, which makes the loss depend on the microbatch size.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import torch
from nemo_grpo.core.objective import Shaped
from nemo_grpo.core.statistics import token_mean
from nemo_grpo.core.token_weights import select_high_covariance, step_covariance
from nemo_grpo.variants.base import RatioConfig


class ClipCov(RatioConfig):
    """Covariance-based clipping of the policy gradient."""

    title: ClassVar[str] = "Clip-Cov"
    paper: ClassVar[str] = "The Entropy Mechanism (2505.22617)"
    reads_scores: ClassVar[bool] = True
    shapes_advantages: ClassVar[bool] = True
    spans_groups: ClassVar[bool] = True
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["clip_cov"] = "clip_cov"
    covariance_min: float = Field(
        1.0, description="lower bound of the covariance of a token that may be clipped"
    )
    covariance_max: float = Field(
        5.0, description="upper bound of the covariance of a token that may be clipped"
    )
    clip_fraction: float = Field(2e-4, gt=0, le=1, description="r, share of the step's tokens to clip")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.covariance_min >= self.covariance_max:
            raise ValueError(
                f"covariance_min={self.covariance_min} must be below covariance_max={self.covariance_max}; "
                "the paper's are 1.0 and 5.0"
            )
        return self

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Set GRPO's advantages to 0 at the chosen tokens: no policy term and no gradient there."""
        base = self.group_advantages(batch)
        advantages = base.per_token(batch.mask)
        covariance = step_covariance(batch.prev_logprobs, advantages, batch.mask)
        is_clipped = select_high_covariance(
            covariance, batch, self.covariance_min, self.covariance_max, self.clip_fraction, seed
        )
        metrics = {"clip_cov/fraction": token_mean(is_clipped.to(advantages.dtype), batch.mask)}
        return Shaped(torch.where(is_clipped, 0.0, advantages), base, metrics=metrics)
