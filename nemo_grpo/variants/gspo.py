"""GSPO: one importance ratio, one clip and one term per response (2507.18071).

    s_i  = (pi(o_i) / pi_prev(o_i))^(1 / |o_i|) = exp(mean_t(logp - logp_prev))     Eq. 7
    A_i  = (r_i - mean_g r) / (std_g r + eps)                                       Eq. 6
    term = min(s A, clip(s, 1 - 0.0003, 1 + 0.0004) A)                              Eq. 5, section 5.1
    loss = - sequence_mean(term)

The clip acts only with several updates per step (four in section 5.1): in the first one s is 1.

Deviation: none. The paper adds no KL penalty.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.variants.base import RatioConfig


class GSPO(RatioConfig):
    """Group Sequence Policy Optimization. Defaults: the paper's section 5.1."""

    title: ClassVar[str] = "GSPO"
    paper: ClassVar[str] = "GSPO (2507.18071)"

    variant: Literal["gspo"] = "gspo"
    aggregation: Aggregation = Field("sequence_mean", description="1/G sum_i; another one is refused")
    ratio_clip_min: float | None = Field(3e-4, ge=0, description="lower clip distance from 1 (section 5.1)")
    ratio_clip_max: float | None = Field(4e-4, ge=0, description="upper clip distance from 1 (section 5.1)")
    sequence_level_importance_ratios: Literal[True] = Field(
        True, description="one ratio per response, the geometric mean of its tokens'; always true"
    )
