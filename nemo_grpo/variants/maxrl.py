"""MaxRL: maximum likelihood of a right answer in place of its expected reward (2602.02710).

    A_i  = (r_i - mean_g r) / (mean_g r + eps)                        0 where the mean is not above 0
    term = min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A)
    loss = - token_mean(term)

With rewards of 0 and 1 the mean is the share p of right answers among n responses, and the gradient is that
of the first n terms of  log p = - sum_k (1 - p)^k / k.  One term is the expected reward, up to a constant;
many terms approach the log-likelihood of a right answer.

Rewards are meant to be 0 or more. A group whose mean is 0 or below has no likelihood to raise: its advantages
are 0, as in prime-rl. `maxrl/mean_below_zero` is the share of responses in groups whose mean is negative.

Deviation: the paper divides by the mean alone; eps and the clip are those of the released code. There a group
of one response is divided by eps; here it has no signal.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.advantages import GroupAdvantages, group_advantages
from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.objective import Shaped
from nemo_grpo.variants.base import RatioConfig


class MaxRL(RatioConfig):
    """Maximum Likelihood Reinforcement Learning."""

    title: ClassVar[str] = "MaxRL"
    paper: ClassVar[str] = "MaxRL (2602.02710)"
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["maxrl"] = "maxrl"
    advantage_eps: float = Field(1e-6, ge=0, description="added to the group's mean reward")
    normalize_rewards: Literal[False] = Field(
        False, description="not in MaxRL, which divides by the mean in place of the standard deviation"
    )
    use_leave_one_out_baseline: Literal[False] = Field(
        False, description="not in MaxRL, whose mean is that of the whole group"
    )

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def group_advantages(self, batch: TokenBatch) -> GroupAdvantages:
        """Divide the centred rewards by their group's mean."""
        return group_advantages(batch, normalization="mean", eps=self.advantage_eps)

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Give every token its response's advantage, and count the responses in groups of negative mean."""
        shaped = super().shape(batch, seed)
        groups = shaped.base.groups
        mean = groups.spread(groups.mean(batch.rewards, batch.in_groups))
        is_below_zero = (mean < 0) & batch.sample_mask
        share = is_below_zero.sum() / batch.sample_mask.sum().clamp(min=1)
        return replace(shaped, metrics={"maxrl/mean_below_zero": share})
