"""TR-GRPO: token-regulated GRPO, weights from the token's own probability (2511.00066, Eqs. 10-12).

    pi_it  = exp(logp_it)                                             current policy, no gradient
    w_it   = clip(alpha (sigmoid(tau pi_it) - mu), lower, upper)      Eq. 12
    policy = w min(rho A, clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max) A)
    KL     = x - log x - 1,  x = w exp(logp_ref - logp)               Eq. 11
    loss   = - token_mean(policy - beta KL)

Deviation: Eqs. 5 and 10 print 1 / sum_i |o_i| inside the expectation over prompts: `aggregation:
group_token_mean`; the default is token_mean. Two printed forms cannot be what produced the paper's results;
both stay available.
- `tau_convention`: Eq. 12 prints pi / tau. With the paper's constants w is then 1 for every token: plain
  GRPO. Its appendix C.1 (range of the sigmoid, centred range, Table 7) fits only tau pi: `multiply`. A
  configuration whose weight is the same for every probability is refused unless `allow_constant_weight`.
- `weight_placement`: Eq. 10 prints w inside the clip. With upper = 1.4 > 1 + ratio_clip_max every token with
  pi > 0.211 and A > 0 then has no gradient at rho = 1: `outside`. The metric clipped_at_unit_ratio counts
  such tokens.
"""

import math
import warnings
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.kl import kl_estimate, weighted_k3
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.core.random import token_uniforms
from nemo_grpo.core.statistics import token_mean
from nemo_grpo.core.token_weights import probability_weights
from nemo_grpo.variants.base import RatioConfig, ratio_metrics

WEIGHT_METRIC = "tr_grpo/weight_mean"


class TRGRPO(RatioConfig):
    """Token-Regulated GRPO. Defaults: Table 6 and appendix B.2."""

    title: ClassVar[str] = "TR-GRPO"
    paper: ClassVar[str] = "Token-Level Probability Shaping (2511.00066)"
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["tr_grpo"] = "tr_grpo"
    ratio_clip_max: float | None = Field(0.24, ge=0, description="upper clip distance from 1 (Table 6)")
    reference_policy_kl_penalty: float = Field(0.001, ge=0, description="beta (Table 6)")
    alpha: float = Field(2.0, description="scale of the shaping function")
    mu: float = Field(0.25, description="offset of the shaping function")
    tau: float = Field(9.0, gt=0, description="sharpness of the sigmoid")
    lower: float = Field(1.0, gt=0, description="L, smallest weight")
    upper: float = Field(1.4, gt=0, description="U, largest weight")
    tau_convention: Literal["multiply", "divide"] = Field(
        "multiply", description="sigmoid(tau pi), or sigmoid(pi / tau) as printed in Eq. 12"
    )
    weight_placement: Literal["outside", "inside"] = Field(
        "outside", description="weight times the clipped term, or inside the clip as printed in Eq. 10"
    )
    kl_weighting: Literal["inside", "none", "outer"] = Field(
        "inside", description="weight in the KL: inside its ratio (Eq. 11), outer (a factor), or none"
    )
    weighting: Literal["probability", "equal", "random", "reverse"] = Field(
        "probability", description="ablations of Table 4: 1, uniform in [0.5, 1.5], or 2 - w"
    )
    allow_constant_weight: bool = Field(
        False, description="accept shaping constants that give every token the same weight"
    )

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.lower > self.upper:
            raise ValueError(f"lower={self.lower} must not exceed upper={self.upper}")
        if self.weighting == "reverse" and self.upper >= 2:
            raise ValueError(
                f"upper={self.upper}: weighting=reverse uses 2 - w, which must be positive; use upper < 2"
            )
        if self.kl_weighting == "inside" and self.reference_policy_kl_type != "k3":
            raise ValueError(
                f"reference_policy_kl_type={self.reference_policy_kl_type}: kl_weighting=inside is defined "
                "for k3; use k3, or kl_weighting none or outer"
            )
        return self

    @model_validator(mode="after")
    def _weights_differ_between_tokens(self) -> Self:
        # The weight is monotone in pi, so it is constant if it is the same at both ends.
        weight_at_0 = self.weight_at(0.0)
        is_constant = weight_at_0 == self.weight_at(1.0)
        depends_on_probability = self.weighting in ("probability", "reverse")
        if is_constant and depends_on_probability and not self.allow_constant_weight:
            raise ValueError(
                f"alpha={self.alpha}, mu={self.mu}, tau={self.tau}, lower={self.lower}, upper={self.upper}, "
                f"tau_convention={self.tau_convention} give weight {weight_at_0:g} to every token (with the "
                "paper's constants pi / tau always does: plain GRPO); use tau_convention=multiply, other "
                "constants, weighting=equal, or allow_constant_weight=true"
            )
        return self

    @model_validator(mode="after")
    def _inside_weight_stays_within_the_clip(self) -> Self:
        if (
            self.weight_placement == "inside"
            and self.ratio_clip_max is not None
            and self.upper > 1 + self.ratio_clip_max
        ):
            warnings.warn(
                f"tr_grpo: weight_placement=inside with upper={self.upper} > 1 + ratio_clip_max="
                f"{1 + self.ratio_clip_max:g}: likely tokens of good responses get no gradient (see the "
                "metric tr_grpo/clipped_at_unit_ratio); use outside, or upper <= 1 + ratio_clip_max",
                stacklevel=2,
            )
        return self

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True if all step-level weights are plain factors of the policy term.

        Only the random ablation has step-level weights; all other weights follow the current policy. Inside
        the KL or inside a clip they are no plain factors.
        """
        if self.weighting != "random":
            return not self.weights_kl_by_group
        weights_kl = self.kl_weighting != "none" and self.reference_policy_kl_penalty > 0
        weights_clip = self.weight_placement == "inside" and self.ratio_clip_min is not None
        return not (weights_kl or weights_clip or self.weights_kl_by_group)

    def weight_at(self, probability: float) -> float:
        """Evaluate the shaping function at one probability (Eq. 12)."""
        x = probability * self.tau if self.tau_convention == "multiply" else probability / self.tau
        sigmoid = 1 / (1 + math.exp(-x))
        unclipped = self.alpha * (sigmoid - self.mu)
        return min(max(unclipped, self.lower), self.upper)

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Compute GRPO's advantages, and draw the random ablation's weights, once per step."""
        shaped = super().shape(batch, seed)
        if self.weighting != "random":
            return shaped
        weights = (0.5 + token_uniforms(batch, seed)).to(shaped.advantages.dtype)
        metrics = {WEIGHT_METRIC: token_mean(weights, batch.mask)}
        return Shaped(shaped.advantages, shaped.base, token_weights=weights, metrics=metrics)

    def token_weights(self, prepared: PreparedBatch) -> Tensor:
        """Compute the weights of the policy term, [B, T], without gradient."""
        logprobs = prepared.batch.next_token_logprobs.detach()
        if self.weighting == "random" and prepared.token_weights is not None:
            return prepared.token_weights
        # A folded step has no token weights: its advantages contain the random ones.
        if self.weighting in ("equal", "random"):
            return torch.ones_like(logprobs)
        w = probability_weights(
            logprobs,
            alpha=self.alpha,
            mu=self.mu,
            tau=self.tau,
            lower=self.lower,
            upper=self.upper,
            multiply=self.tau_convention == "multiply",
        )
        return 2 - w if self.weighting == "reverse" else w

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the weighted clipped policy term and the weighted KL."""
        batch = prepared.batch
        advantages = prepared.advantages
        w = self.token_weights(prepared)
        ratio = self.ratio(batch)
        if self.weight_placement == "outside":
            policy, metrics = self.policy_term(ratio, advantages)
            policy = w * policy
        else:
            policy, metrics = self.policy_term(w * ratio, advantages)
        if self.weighting != "random":  # `shape` has measured the random weights over the whole step
            metrics[WEIGHT_METRIC] = w
        metrics |= ratio_metrics(batch, ratio)
        metrics["tr_grpo/clipped_at_unit_ratio"] = self._clipped_at_unit_ratio(w, advantages)
        return TokenTerms(policy, self._weighted_kl(batch, w), metrics)

    def _clipped_at_unit_ratio(self, w: Tensor, advantages: Tensor) -> Tensor:
        """Mark with 1 the tokens that the clip leaves without gradient at rho = 1: [B, T]."""
        if self.weight_placement == "outside" or self.ratio_clip_min is None or self.ratio_clip_max is None:
            return torch.zeros_like(w)
        # With the weight inside the clip, w rho is compared with the bounds, and rho is 1.
        is_above = (advantages > 0) & (w > 1 + self.ratio_clip_max)
        is_below = (advantages < 0) & (w < 1 - self.ratio_clip_min)
        return (is_above | is_below).to(w.dtype)

    def _weighted_kl(self, batch: TokenBatch, w: Tensor) -> Tensor | None:
        if not self.needs_reference or batch.reference_policy_logprobs is None:
            return None
        if self.kl_weighting == "inside":
            kl = weighted_k3(batch.kl_logprobs, batch.reference_policy_logprobs, w)
            return self.kl_gradient(kl, batch)
        kl = kl_estimate(batch.kl_logprobs, batch.reference_policy_logprobs, self.reference_policy_kl_type)
        if self.kl_weighting == "outer":
            kl = w * kl
        return self.kl_gradient(kl, batch)
