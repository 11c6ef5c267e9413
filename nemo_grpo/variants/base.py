"""Base of every variant's configuration: strict keys, common names, common pieces of an objective."""

from dataclasses import replace
from inspect import isfunction
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_grpo.core.advantages import GroupAdvantages, RewardNormalization, group_advantages
from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.importance import ImportanceCorrection, Truncation
from nemo_grpo.core.kl import KLType, kl_estimate, with_score_function
from nemo_grpo.core.lazy import Tensor
from nemo_grpo.core.objective import Objective, Shaped, TokenTerms
from nemo_grpo.core.surrogates import (
    MAX_LOG_RATIO,
    clipped_policy_gradient,
    importance_ratio,
    sequence_importance_ratio,
)

SAFE_DECLARATIONS = {
    "reads_scores": True,
    "shapes_advantages": True,
    "spans_groups": True,
    "learns_without_advantages": True,
    "folds": False,
}
"""Declaration -> the value that is right for any loss, and lets the engines skip no work."""
UNRELATED = ("resampling",)
"""Methods that no declaration speaks of."""


class VariantConfig(BaseModel):
    """One variant's parameters: the keys of the recipe's ``loss_fn`` section. Unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, defer_build=True
    )

    title: ClassVar[str] = "own variant"
    paper: ClassVar[str] = "none"
    stock_switch: ClassVar[str | None] = None
    """NeMo-RL's boolean that asks its own loss for this objective."""
    is_stock: ClassVar[bool] = False
    """NeMo-RL's own loss, which NeMo-RL computes with its own advantages."""
    needs_entropy: ClassVar[bool] = False
    """`shape` reads the policy's entropies."""
    compares_with_reference: ClassVar[bool] = False
    """`shape` subtracts the reference policy's logprobs from the policy's, with or without a KL penalty."""
    reads_scores: ClassVar[bool] = True
    """`shape` reads the scored logprobs. False saves the scoring pass of a step with one update."""
    shapes_advantages: ClassVar[bool] = True
    """`shape` gives a token another advantage than its response's group advantage."""
    spans_groups: ClassVar[bool] = True
    """`shape` computes a response's advantages or weights from other groups than its own, too."""
    learns_without_advantages: ClassVar[bool] = True
    """`terms` has a gradient where the advantage is 0, the KL penalty's aside."""
    folds: ClassVar[bool] = False
    """Loss and gradient stay the same with all weights in the advantages; see `PreparedBatch.folded`."""
    learns_from_demonstrations: ClassVar[bool] = False
    """A step is the task's demonstrations, one per prompt; nothing is sampled."""
    whole_groups_key: ClassVar[str | None] = None
    """Boolean parameter under which every loss call needs exactly one whole group."""
    sampling_keys: ClassVar[tuple[str, ...]] = ()
    """Parameters that have an effect only with grpo.use_dynamic_sampling."""
    without_dynamic_sampling: ClassVar[str | None] = None
    """Difference from the paper without grpo.use_dynamic_sampling, for messages; None: no difference."""

    variant: str
    aggregation: Aggregation = Field(
        "token_mean",
        description="how token terms are reduced: token_mean, group_token_mean, sequence_mean, constant",
    )
    max_response_length: int | None = Field(
        None, gt=0, description="L_max, the divisor of aggregation=constant"
    )
    advantage_eps: float = Field(1e-6, ge=0, description="added to the standard deviation of rewards")
    use_importance_sampling_correction: bool = Field(
        False, description="weight the policy term by policy over sampler (FP8 or asynchronous rollouts)"
    )
    truncated_importance_sampling_type: Truncation | None = Field(
        None, description="bound that weight: tis clamps, icepop drops tokens, seq-mask-tis responses"
    )
    truncated_importance_sampling_ratio: float | None = Field(
        None, gt=0, description="upper bound of the weight"
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        None, ge=0, description="lower bound of the weight; null: 0"
    )

    force_on_policy_ratio: bool = Field(
        False, description="take the ratio as 1 without a scoring pass; one update per step (NeMo-RL)"
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop inherited declarations that speak of code which the class no longer runs.

        A declaration (`SAFE_DECLARATIONS`) holds for the methods of the class that makes it. A class that
        overrides one of these methods (`shape`, `terms`, `ratio`, `policy_term`, ...), itself or by a mixin,
        gets the safe value of every declaration that it does not make again.
        """
        super().__init_subclass__(**kwargs)
        for name, safe in SAFE_DECLARATIONS.items():
            place = next(i for i, parent in enumerate(cls.__mro__) if name in vars(parent))
            later = cls.__mro__[:place]
            declared_for = {method for parent in cls.__mro__[place:] for method in vars(parent)}
            if any(_methods(parent) & declared_for for parent in later):
                setattr(cls, name, safe)

    @model_validator(mode="after")
    def _forced_ratio_needs_no_scored_logprobs(self) -> Self:
        if self.force_on_policy_ratio and not self.is_stock and self.needs_scores:
            raise ValueError(
                "force_on_policy_ratio=true: the advantages are shaped by the scored logprobs or entropies, "
                "which NeMo-RL then leaves out; set it to false (an own loss that reads neither declares "
                "reads_scores = False)"
            )
        return self

    @model_validator(mode="after")
    def _constant_aggregation_has_max_response_length(self) -> Self:
        if self.aggregation == "constant" and self.max_response_length is None:
            raise ValueError(
                "aggregation=constant divides by max_response_length; set it to the longest response"
            )
        return self

    @model_validator(mode="after")
    def _truncation_is_complete(self) -> Self:
        kind, upper = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if kind is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type={kind} bounds the weights of "
                "use_importance_sampling_correction; set that to true"
            )
        if (kind is None) != (upper is None) or (kind is None and lower is not None):
            raise ValueError(
                f"truncated_importance_sampling_type={kind}, _ratio={upper}, _ratio_min={lower}: set type "
                "and ratio together, ratio_min with them"
            )
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            raise ValueError(f"truncated_importance_sampling_type={kind} needs a lower bound; set _ratio_min")
        if upper is not None and lower is not None and lower > upper:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={lower} is above _ratio={upper}; lower it"
            )
        return self

    def importance_correction(self) -> ImportanceCorrection | None:
        """Return the reweighting of the policy term, or None."""
        if not self.use_importance_sampling_correction:
            return None
        upper = self.truncated_importance_sampling_ratio
        return ImportanceCorrection(
            self.truncated_importance_sampling_type,
            self.truncated_importance_sampling_ratio_min or 0.0,
            float("inf") if upper is None else upper,
        )

    @property
    def needs_scores(self) -> bool:
        """True if `shape` waits for the scoring pass, for its logprobs or its entropies."""
        return self.needs_entropy or self.reads_scores

    @property
    def needs_reference(self) -> bool:
        """True if the reference policy's logprobs are needed."""
        return self.compares_with_reference

    @property
    def needs_whole_groups(self) -> bool:
        """True if a loss call must see exactly one whole group."""
        return self.whole_groups_key is not None and bool(getattr(self, self.whole_groups_key))

    @property
    def carries_statistics(self) -> bool:
        """True if `shape` reads `TokenBatch.carried`, which a checkpoint must then keep."""
        return False

    def resampling(self, max_draws: int) -> tuple[float, int]:
        """Return (minimum share of groups with signal, maximum draws per step) of dynamic sampling."""
        return 1.0, max_draws

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Compute the step-level part; see `Objective`."""
        raise AssertionError(f"{type(self).__name__} does not implement shape()")

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the token-level part; see `Objective`."""
        raise AssertionError(f"{type(self).__name__} does not implement terms()")

    def build(self) -> Objective:
        """Compose the objective."""
        return Objective(
            name=self.variant,
            shape=self.shape,
            terms=self.terms,
            aggregation=self.aggregation,
            max_response_length=self.max_response_length,
            correction=self.importance_correction(),
            needs_entropy=self.needs_entropy,
            needs_reference=self.needs_reference,
            needs_scores=self.needs_scores,
            learns_without_advantages=self.learns_without_advantages,
            whole_groups_per_loss_call=self.needs_whole_groups,
        )


def _methods(owner: type) -> set[str]:
    """Name the public methods that a class itself defines; pydantic's validators are private ones."""
    return {
        name
        for name, value in vars(owner).items()
        if isfunction(value) and not name.startswith("_") and name not in UNRELATED
    }


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
        a = self.group_advantages(batch)
        return Shaped(a.per_token(batch.mask), a)


class KLConfig(VariantConfig):
    """Variants with an optional KL penalty to the reference policy."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="beta, the factor of the KL penalty")
    reference_policy_kl_type: KLType = Field("k3", description="estimator of the KL penalty: k1, k2, k3")
    kl_score_function_gradient: bool = Field(
        False, description="KL gradient as in NeMo-RL's own loss, with the score-function term"
    )

    @model_validator(mode="after")
    def _penalty_pulls_to_the_reference(self) -> Self:
        is_k1 = self.reference_policy_kl_type == "k1" and self.reference_policy_kl_penalty > 0
        if is_k1 and not self.kl_score_function_gradient:
            raise ValueError(
                "reference_policy_kl_type=k1: the derivative of k1 is that of the policy's logprob, whatever "
                "the reference says, so the penalty would hold nothing back; set "
                "kl_score_function_gradient=true, as NeMo-RL's own loss has it, or take k2 or k3"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """True with a KL penalty, or for the advantages."""
        return self.compares_with_reference or self.reference_policy_kl_penalty > 0

    @property
    def weights_kl_by_group(self) -> bool:
        """True if the aggregation weights a KL penalty, too, by factors that no advantage can carry."""
        return self.aggregation == "group_token_mean" and self.reference_policy_kl_penalty > 0

    def kl_term(self, batch: TokenBatch) -> Tensor | None:
        """Estimate the KL, [B, T]; None without a penalty."""
        if not self.needs_reference or batch.reference_policy_logprobs is None:
            return None
        kl = kl_estimate(batch.kl_logprobs, batch.reference_policy_logprobs, self.reference_policy_kl_type)
        return self.kl_gradient(kl, batch)

    def kl_gradient(self, kl: Tensor, batch: TokenBatch) -> Tensor:
        """Give a KL estimate the gradient that `kl_score_function_gradient` selects."""
        return with_score_function(kl, batch.kl_logprobs) if self.kl_score_function_gradient else kl

    def build(self) -> Objective:
        return replace(super().build(), kl_penalty=self.reference_policy_kl_penalty)


class RatioConfig(GroupRewardConfig, KLConfig):
    """Variants with an importance ratio, an optional clip and an optional KL penalty."""

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
        """True without a KL penalty that the aggregation weights."""
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
        correction = super().importance_correction()
        if correction is None:
            return None
        return replace(correction, sequence_level=self.sequence_level_importance_ratios)

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the (clipped) importance-weighted policy term, and the KL term if penalised."""
        batch = prepared.batch
        ratio = self.ratio(batch)
        policy, metrics = self.policy_term(ratio, prepared.advantages)
        return TokenTerms(policy, self.kl_term(batch), metrics | ratio_metrics(batch, ratio))

    def ratio(self, batch: TokenBatch) -> Tensor:
        """Compute rho, [B, T]: per token, or one per response."""
        if self.sequence_level_importance_ratios:
            return sequence_importance_ratio(batch.next_token_logprobs, batch.prev_logprobs, batch.mask)
        return importance_ratio(batch.next_token_logprobs, batch.prev_logprobs)

    def policy_term(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the [B, T] term to maximise, rho A or its clipped form, and its clip metrics."""
        if self.ratio_clip_min is None or self.ratio_clip_max is None:
            return ratio * advantages, {}
        bounds = (self.ratio_clip_min, self.ratio_clip_max, self.ratio_clip_c)
        value, is_clipped = clipped_policy_gradient(ratio, advantages, *bounds)
        return value, {"ratio/clip_fraction": is_clipped}


def ratio_metrics(batch: TokenBatch, ratio: Tensor) -> dict[str, Tensor]:
    """Measure how far the policy moved within the step, [B, T]; ``ratio``: of tokens or responses."""
    moved = batch.next_token_logprobs.detach() - batch.prev_logprobs
    bounded = moved.clamp(max=MAX_LOG_RATIO)
    return {
        "ratio/mean": ratio.detach(),
        "ratio/clamped_fraction": moved.abs().gt_(MAX_LOG_RATIO),
        "kl/previous": bounded.expm1().sub_(bounded),
    }
