"""GRPO: group-relative policy optimisation (DeepSeekMath, 2402.03300).

    A_i  = (r_i - mean_g r) / (std_g r + eps)                         std with ddof 1
    term = min(rho A, clip(rho, 1 - ratio_clip_min, 1 + ratio_clip_max) A) - beta k3
    loss = - token_mean(term)

Deviation: token_mean where DeepSeekMath prints `aggregation: sequence_mean`; ERPO and TR-GRPO print the token
mean of each prompt's group, `group_token_mean`.
"""

from typing import ClassVar, Literal

from nemo_grpo.variants.base import RatioConfig


class GRPO(RatioConfig):
    """Group Relative Policy Optimization."""

    title: ClassVar[str] = "GRPO"
    paper: ClassVar[str] = "DeepSeekMath (2402.03300)"

    variant: Literal["grpo"] = "grpo"
