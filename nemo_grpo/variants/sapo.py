"""SAPO: a soft gate in place of the clip, steeper for negative advantages (2511.20347).

    A_i  = (r_i - mean_g r) / (std_g r + eps)
    f    = sigmoid(tau (rho - 1)) 4 / tau            tau = tau_positive where A > 0, else tau_negative
    loss = - sequence_mean(f(rho) A)

The gradient is  4 s (1 - s) rho A dlogp,  s = sigmoid(tau (rho - 1)).  Its factor 4 s (1 - s) is 1 at rho = 1
for any tau, which gives GRPO's gradient, and falls as rho moves away to either side. A clip instead keeps the
whole gradient inside its bounds and none outside.

Deviation: none in the loss. The value of f at rho = 1 is 2 / tau, so a SAPO loss is not comparable with a
clipped one. The paper trains in several updates per step; in the first one the gradient is that of GRPO with
`aggregation: sequence_mean`.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.variants.base import TokenRatioConfig


class SAPO(TokenRatioConfig):
    """Soft Adaptive Policy Optimization."""

    title: ClassVar[str] = "SAPO"
    paper: ClassVar[str] = "SAPO (2511.20347)"
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["sapo"] = "sapo"
    aggregation: Aggregation = Field("sequence_mean", description="how token terms are reduced: token_mean, "
                                     "group_token_mean, sequence_mean, constant")  # fmt: skip
    # Keys of the other ratio variants. A resolved recipe holds every key, and a recipe inherits those of the
    # recipe that it builds on, so they are accepted as long as they are off.
    ratio_clip_min: None = Field(None, description="not in SAPO, whose gate replaces the clip")
    ratio_clip_max: None = Field(None, description="not in SAPO, whose gate replaces the clip")
    ratio_clip_c: None = Field(None, description="not in SAPO, whose gate replaces the clip")
    sequence_level_importance_ratios: Literal[False] = Field(
        False, description="not in SAPO, whose gate is of tokens"
    )

    tau_positive: float = Field(
        1.0, gt=0, description="temperature of the gate where the advantage is positive"
    )
    tau_negative: float = Field(1.05, gt=0, description="temperature of the gate elsewhere")

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def policy_term(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gated term, and how much of the gradient at ratio 1 the gate leaves."""
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative).to(ratio.dtype)
        gate = torch.sigmoid(tau * (ratio - 1))
        f = gate * (4 / tau)
        # df / d rho = 4 s (1 - s), which is 1 at ratio 1.
        gradient_share = (4 * gate * (1 - gate)).detach()
        return f * advantages, {"sapo/gradient_share": gradient_share}
