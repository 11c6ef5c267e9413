"""Recipe keys of every variant: its name, the reduction of its terms, and the correction for the sampler.

`variants.config.VariantConfig` inherits them.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.core.importance import ImportanceCorrection, Truncation


class ReductionKeys(BaseModel):
    """The variant's name, and the reduction of its token terms to one number."""

    # Not deferred, unlike a section's: a mistake in a user's class is told with the line of that class.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    variant: str
    aggregation: Aggregation = Field(
        "token_mean",
        description="how token terms are reduced: token_mean, group_token_mean, sequence_mean, constant",
    )
    max_response_length: int | None = Field(
        None, gt=0, description="L_max, the divisor of aggregation=constant"
    )
    advantage_eps: float = Field(1e-6, ge=0, description="added to the standard deviation of rewards")

    @model_validator(mode="after")
    def _constant_aggregation_has_max_response_length(self) -> Self:
        if self.aggregation == "constant" and self.max_response_length is None:
            raise ValueError(
                "aggregation=constant divides by max_response_length; set it to the longest response"
            )
        return self


# A subclass of the keys above and no independent mixin: pydantic orders fields by inheritance, and a resolved
# recipe should open with the variant's name.
class CorrectionKeys(ReductionKeys):
    """Correction for the difference between the policy that is trained and the one that sampled."""

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

    @model_validator(mode="after")
    def _truncation_is_complete(self) -> Self:
        kind = self.truncated_importance_sampling_type
        upper = self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if kind is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type={kind} bounds the weights of "
                "use_importance_sampling_correction; set that to true"
            )
        has_type_without_bound = kind is not None and upper is None
        has_bound_without_type = kind is None and (upper is not None or lower is not None)
        if has_type_without_bound or has_bound_without_type:
            raise ValueError(
                f"truncated_importance_sampling_type={kind}, _ratio={upper}, _ratio_min={lower}: set type "
                "and ratio together, ratio_min with them"
            )
        # tis only clamps large weights; the other two drop what lies outside an interval.
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            raise ValueError(f"truncated_importance_sampling_type={kind} needs a lower bound; set _ratio_min")
        if upper is not None and lower is not None and lower > upper:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={lower} is above _ratio={upper}; lower it"
            )
        return self

    def importance_correction(self) -> ImportanceCorrection | None:
        """Return the reweighting of the policy term, or None without a correction."""
        if not self.use_importance_sampling_correction:
            return None
        lower = self.truncated_importance_sampling_ratio_min
        upper = self.truncated_importance_sampling_ratio
        return ImportanceCorrection(
            self.truncated_importance_sampling_type,
            0.0 if lower is None else lower,
            float("inf") if upper is None else upper,
        )
