"""DAPO: decoupled clip and dynamic sampling (2503.14476).

    A_i  = (r_i - mean_g r) / (std_g r + eps)
    term = min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)                 Eq. 8, "clip-higher"
    loss = - token_mean(term)                                         Eq. 8

Dynamic sampling (groups with equal rewards are dropped and prompts drawn again) and the overlong penalty act
before the loss: `grpo.use_dynamic_sampling`, `grpo.reward_shaping`; `core.resampling`, `core.advantages`.

Deviation: draws are bounded (`grpo.dynamic_sampling_max_gen_batches`); then the step trains on what it has.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.variants.base import RatioConfig


class DAPO(RatioConfig):
    """Decoupled Clip and Dynamic sAmpling Policy Optimization."""

    title: ClassVar[str] = "DAPO"
    paper: ClassVar[str] = "DAPO (2503.14476)"
    without_dynamic_sampling: ClassVar[str | None] = "groups of equal rewards stay in the step"

    variant: Literal["dapo"] = "dapo"
    ratio_clip_max: float | None = Field(0.28, ge=0, description="upper clip distance from 1 (clip-higher)")
