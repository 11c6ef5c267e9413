"""Dr.GRPO: GRPO without its length and difficulty biases (2503.20783).

    A_i  = r_i - mean_g r
    term = min(rho A, clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max) A)
    loss = - sum(term) / (number of sequences x max_response_length)

Deviation: none. max_response_length is the generation limit, a constant of the run, never the longest
response seen.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.variants.base import RatioConfig


class DrGRPO(RatioConfig):
    """GRPO done right: no std, constant length normaliser, no KL."""

    title: ClassVar[str] = "Dr.GRPO"
    paper: ClassVar[str] = "Understanding R1-Zero-Like Training (2503.20783)"

    variant: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Field("constant", description="divide by sequences x max_response_length")
    normalize_rewards: bool = Field(False, description="divide by the group's standard deviation (ddof 1)")
