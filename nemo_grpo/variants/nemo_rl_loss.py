"""NeMo-RL's own loss, which a recipe without ``loss_fn.variant`` trains with.

NeMo-RL computes it. This class checks its keys, for the rules and the planner. Names and defaults are those
of ``ClippedPGLossConfig`` in NeMo-RL 0.7.0 and 7ea279abf.
"""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.core.objective import Objective
from nemo_grpo.support.errors import UserError, as_yaml
from nemo_grpo.variants.base import KLConfig


class NeMoRLLoss(KLConfig):
    """The ``loss_fn`` section of a stock recipe."""

    title: ClassVar[str] = "NeMo-RL's own loss"
    is_stock: ClassVar[bool] = True

    variant: None = None  # type: ignore[assignment]
    aggregation: Aggregation = Field("token_mean", exclude=True)
    max_response_length: int | None = Field(None, exclude=True)
    advantage_eps: float = Field(1e-6, exclude=True)
    kl_score_function_gradient: bool = Field(True, exclude=True)

    reference_policy_kl_penalty: float = Field(0.01, ge=0)
    token_level_loss: bool = True
    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.2, ge=0)
    ratio_clip_c: float | None = Field(None, gt=1)
    disable_ppo_ratio: bool = False
    sequence_level_importance_ratios: bool = False
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    positive_example_nll_weight: float = 0.0

    @classmethod
    def keys(cls) -> dict[str, Any]:
        """Map every key of the section to NeMo-RL's default."""
        return {name: field.default for name, field in cls.model_fields.items() if not field.exclude}

    @model_validator(mode="before")
    @classmethod
    def _aggregation_is_by_token_level_loss(cls, section: dict[str, Any]) -> dict[str, Any]:
        # The fields with exclude=True are keys of our variants. NeMo-RL's section does not have them.
        for name, field in cls.model_fields.items():
            if field.exclude and name in section:
                raise UserError(
                    f"loss_fn.{name}={as_yaml(section[name])} is a parameter of variants, and without "
                    "loss_fn.variant NeMo-RL's own loss trains; name a variant, or remove it"
                )
        by_tokens = section.get("token_level_loss", True)
        return {**section, "aggregation": "token_mean" if by_tokens else "sequence_mean"}

    @model_validator(mode="after")
    def _truncation_is_complete(self) -> Self:
        # Replaces the parent's validator: NeMo-RL ignores the bounds of a correction that is off.
        return self

    def build(self) -> Objective:
        """Refuse: nothing here computes this loss."""
        raise AssertionError("NeMo-RL builds its own loss")
