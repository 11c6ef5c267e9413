"""Group advantages: how much better a response was than its siblings."""

from dataclasses import dataclass
from typing import Literal

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.statistics import Groups, row_std

RewardNormalization = Literal["none", "group", "batch"]


@dataclass(frozen=True)
class GroupAdvantages:
    """Per-sequence advantages and the groups behind them.

    Attributes:
        values: [B], the rewards' dtype; exactly 0 without signal and where the reward does not count.
        groups: the row -> group numbering.
        sizes: [B] int64; counting sequences of the row's group.
        has_signal: [B] bool; the row counts and its group's rewards differ.
    """

    values: Tensor
    groups: Groups
    sizes: Tensor
    has_signal: Tensor

    def per_token(self, mask: Tensor) -> Tensor:
        """[B, T]: every token of a response carries its advantage; exactly 0 where mask is False."""
        return torch.where(mask, self.values[:, None], self.values.new_zeros(()))


def group_advantages(
    batch: TokenBatch,
    *,
    normalization: RewardNormalization = "group",
    eps: float = 1e-6,
    leave_one_out: bool = False,
) -> GroupAdvantages:
    """Centre each reward on its group and scale it.

    A_i = (r_i - mean_g r) / F,   F = 1 | std_g(r) + eps | std_batch(r) + eps   (std with ddof 1)

    With ``leave_one_out`` mean and std are those of the *other* responses of the group, and a std of 0
    becomes 1: NeMo-RL's default estimator, kept for comparison; none of the papers uses it.

    Args:    batch: the whole step, cleaned under the mask.
    Returns: `GroupAdvantages`.  Equal rewards within a group give exactly 0, whatever eps.
    """
    valid, rewards = batch.in_groups, batch.rewards.double()
    groups = Groups.from_ids(batch.group_ids)
    highest = groups.spread(groups.extreme(rewards, valid, "amax"))
    differs = valid & (highest > groups.spread(groups.extreme(rewards, valid, "amin")))
    values = rewards - groups.spread(groups.mean(rewards, valid))
    if leave_one_out:
        values = _leave_one_out(values, rewards, valid, groups, normalization, eps)
    elif normalization == "group":
        values = values / (groups.spread(groups.std(rewards, valid)) + eps)
    elif normalization == "batch":
        values = values / (row_std(rewards, valid) + eps)
    values = torch.where(differs, values, 0.0).to(batch.rewards.dtype)
    sizes = groups.spread(groups.sum(batch.sample_mask)).long()
    return GroupAdvantages(values, groups, sizes, differs & batch.sample_mask)


def _leave_one_out(
    centred: Tensor,
    rewards: Tensor,
    valid: Tensor,
    groups: Groups,
    normalization: RewardNormalization,
    eps: float,
) -> Tensor:
    others = (groups.spread(groups.sum(valid)) - 1).clamp(min=1)
    mean = (groups.spread(groups.sum(torch.where(valid, rewards, 0.0))) - rewards) / others
    if normalization == "none":
        return rewards - mean
    if normalization == "batch":
        raise ValueError("leave_one_out with normalization='batch' is not defined; use 'none' or 'group'")
    # Var of the others = (sum of all squares - own square) around the others' mean, computed about the group
    # mean.
    squares = groups.spread(groups.sum(torch.where(valid, centred.square(), 0.0))) - centred.square()
    shift = mean - groups.spread(groups.mean(rewards, valid))
    variance = (squares - others * shift.square()).clamp(min=0.0) / (others - 1).clamp(min=1)
    std = variance.sqrt()
    return (rewards - mean) / torch.where(std > 1e-8, std + eps, 1.0)
