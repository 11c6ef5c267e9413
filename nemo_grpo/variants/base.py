"""Base classes of the variants.

A variant derives from one of these classes. Each of them adds recipe keys and code to its own parent:

    VariantConfig       declarations, `shape` and `terms`; see `variants.config`
    GroupRewardConfig   group-relative advantages
    KLConfig            a KL penalty to the reference policy
    TokenRatioConfig    both of these, and one importance ratio per token
    RatioConfig         a clip, a dual clip, and one ratio per response on request
"""

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

from nemo_grpo.core.advantages import GroupAdvantages, RewardNormalization, group_advantages
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.importance import ImportanceCorrection
from nemo_grpo.core.kl import KLType, kl_estimate, with_score_function
from nemo_grpo.core.lazy import Tensor
from nemo_grpo.core.objective import Objective, Shaped, TokenTerms
from nemo_grpo.core.surrogates import (
    MAX_LOG_RATIO,
    clipped_policy_gradient,
    importance_ratio,
    sequence_importance_ratio,
)
from nemo_grpo.variants.config import SAFE_DECLARATIONS, VariantConfig

# Users' own variants import everything that they derive from or call here.
__all__ = [
    "SAFE_DECLARATIONS",
    "GroupRewardConfig",
    "KLConfig",
    "RatioConfig",
    "TokenRatioConfig",
    "VariantConfig",
    "ratio_metrics",
]


class GroupRewardConfig(VariantConfig):
    """Variants whose advantage is the centred group reward, optionally scaled by the group's std."""

    normalize_rewards: bool = Field(True, description="divide by the group's standard deviation (ddof 1)")
    use_leave_one_out_baseline: bool = Field(
        False, description="mean and std of the other responses (NeMo-RL's default; none of the papers)"
    )

    def group_advantages(self, batch: TokenBatch) -> GroupAdvantages:
        """Compute the per-sequence advantages of a whole clean step."""
        normalization: RewardNormalization = "group" if self.normalize_rewards else "none"
        return group_advantages(
            batch,
            normalization=normalization,
            eps=self.advantage_eps,
            leave_one_out=self.use_leave_one_out_baseline,
        )

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Give every token its response's advantage."""
        base = self.group_advantages(batch)
        return Shaped(base.per_token(batch.mask), base)


class KLConfig(VariantConfig):
    """Variants with an optional KL penalty to the reference policy."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="beta, the factor of the KL penalty")
    reference_policy_kl_type: KLType = Field("k3", description="estimator of the KL penalty: k1, k2, k3")
    kl_score_function_gradient: bool = Field(
        False, description="KL gradient as in NeMo-RL's own loss, with the score-function term"
    )

    @model_validator(mode="after")
    def _penalty_pulls_to_the_reference(self) -> Self:
        penalises_k1 = self.reference_policy_kl_type == "k1" and self.reference_policy_kl_penalty > 0
        if penalises_k1 and not self.kl_score_function_gradient:
            raise ValueError(
                "reference_policy_kl_type=k1: the derivative of k1 is that of the policy's logprob, whatever "
                "the reference says, so the penalty would hold nothing back; set "
                "kl_score_function_gradient=true, as NeMo-RL's own loss has it, or take k2 or k3"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """True if a KL penalty or the advantages read the reference policy's logprobs."""
        return self.compares_with_reference or self.reference_policy_kl_penalty > 0

    @property
    def weights_kl_by_group(self) -> bool:
        """True if `group_token_mean` weights a KL penalty, too: its row factors cannot go into advantages."""
        return self.aggregation == "group_token_mean" and self.reference_policy_kl_penalty > 0

    def kl_term(self, batch: TokenBatch) -> Tensor | None:
        """Estimate the KL, [B, T]; None without a penalty."""
        if not self.needs_reference or batch.reference_policy_logprobs is None:
            return None
        kl = kl_estimate(batch.kl_logprobs, batch.reference_policy_logprobs, self.reference_policy_kl_type)
        return self.kl_gradient(kl, batch)

    def kl_gradient(self, kl: Tensor, batch: TokenBatch) -> Tensor:
        """Give a KL estimate the gradient that `kl_score_function_gradient` selects."""
        if not self.kl_score_function_gradient:
            return kl
        return with_score_function(kl, batch.kl_logprobs)

    def build(self) -> Objective:
        """Compose the objective with its KL penalty."""
        return replace(super().build(), kl_penalty=self.reference_policy_kl_penalty)


class TokenRatioConfig(GroupRewardConfig, KLConfig):
    """Variants with an importance ratio per token and an optional KL penalty, without a clip."""

    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the importance-weighted policy term, and the KL term if penalised."""
        batch = prepared.batch
        ratio = self.ratio(batch)
        policy, metrics = self.policy_term(ratio, prepared.advantages)
        return TokenTerms(policy, self.kl_term(batch), metrics | ratio_metrics(batch, ratio))

    def ratio(self, batch: TokenBatch) -> Tensor:
        """Compute rho, [B, T], per token."""
        return importance_ratio(batch.next_token_logprobs, batch.prev_logprobs)

    def policy_term(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the [B, T] term to maximise, rho A, and metrics of it."""
        return ratio * advantages, {}


class RatioConfig(TokenRatioConfig):
    """Variants with an importance ratio per token or per response, an optional clip, and a KL penalty."""

    # Declared again, because the parent's declarations are about its own `ratio` and `policy_term`, which are
    # overridden below. Without them `__init_subclass__` would set the safe values.
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    ratio_clip_min: float | None = Field(0.2, ge=0, description="lower clip distance from 1; null: no clip")
    ratio_clip_max: float | None = Field(0.2, ge=0, description="upper clip distance from 1; null: no clip")
    ratio_clip_c: float | None = Field(
        None, gt=1, description="dual clip for negative advantages; null: none"
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="one ratio per response, the geometric mean of its tokens' (GSPO)"
    )

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    @model_validator(mode="after")
    def _clip_is_a_pair(self) -> Self:
        if (self.ratio_clip_min is None) != (self.ratio_clip_max is None):
            raise ValueError(
                f"ratio_clip_min={self.ratio_clip_min}, ratio_clip_max={self.ratio_clip_max}: a clip has two "
                "sides; set both or neither"
            )
        if self.ratio_clip_c is not None and self.ratio_clip_min is None:
            raise ValueError(
                f"ratio_clip_c={self.ratio_clip_c}: dual clip needs ratio_clip_min and _max; set them"
            )
        return self

    @model_validator(mode="after")
    def _sequence_ratio_is_averaged_per_sequence(self) -> Self:
        if not self.sequence_level_importance_ratios:
            return self
        if self.aggregation != "sequence_mean":
            raise ValueError(
                f"aggregation={self.aggregation}: sequence_level_importance_ratios gives a response one "
                "weight, so responses must count equally; use sequence_mean"
            )
        if self.truncated_importance_sampling_type == "seq-mask-tis":
            raise ValueError(
                "truncated_importance_sampling_type=seq-mask-tis reweights tokens, "
                "sequence_level_importance_ratios responses; use tis or icepop"
            )
        return self

    def importance_correction(self) -> ImportanceCorrection | None:
        """Return the reweighting of the policy term, or None without a correction.

        It is per response if the ratio is.
        """
        correction = super().importance_correction()
        if correction is None:
            return None
        return replace(correction, sequence_level=self.sequence_level_importance_ratios)

    def ratio(self, batch: TokenBatch) -> Tensor:
        """Compute rho, [B, T]: per token, or one per response."""
        if self.sequence_level_importance_ratios:
            return sequence_importance_ratio(batch.next_token_logprobs, batch.prev_logprobs, batch.mask)
        return super().ratio(batch)

    def policy_term(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the [B, T] term to maximise, rho A or its clipped form, and its clip metrics."""
        if self.ratio_clip_min is None or self.ratio_clip_max is None:
            return super().policy_term(ratio, advantages)
        value, is_clipped = clipped_policy_gradient(
            ratio, advantages, self.ratio_clip_min, self.ratio_clip_max, self.ratio_clip_c
        )
        return value, {"ratio/clip_fraction": is_clipped}


def ratio_metrics(batch: TokenBatch, ratio: Tensor) -> dict[str, Tensor]:
    """Measure how far the policy moved within the step.

    Args:
        batch: rows with the current policy's logprobs.
        ratio: [B, T], of tokens or of responses.
    Returns: name -> [B, T], without gradient; ``kl/previous`` is k3 of the policy that scored the step.
    """
    log_ratio = batch.next_token_logprobs.detach() - batch.prev_logprobs
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    return {
        "ratio/mean": ratio.detach(),
        "ratio/clamped_fraction": (log_ratio.abs() > MAX_LOG_RATIO).to(log_ratio.dtype),
        "kl/previous": bounded.expm1() - bounded,
    }
