"""Advantages from rewards: the penalty of long responses, and the comparison within a group."""

from dataclasses import dataclass
from typing import Literal

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.statistics import Groups, row_std

RewardNormalization = Literal["none", "group", "batch"]
PLAUSIBLE_ADVANTAGE = 100.0
"""Largest plausible advantage, in units of the group's range of rewards, or of 1 if that is larger.

A centred reward stays within the range. A standardised one of n responses stays below sqrt(n), and one that
is divided by the mean of n rewards below n, so the limit is n in a group of more than 100 responses."""


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty: float
) -> Tensor:
    """Compute DAPO's soft penalty: linear over the last ``buffer_length`` tokens before the limit.

    Implements DAPO (2503.14476) Eq. 13:  - penalty clip((l - (L_max - L_b)) / L_b, 0, 1)

    Args:
        lengths: [B], response tokens.
        max_response_length: L_max, tokens.
        buffer_length: L_b, tokens.
        penalty: >= 0, subtracted in full at L_max and beyond.
    Returns: [B] float32, <= 0, to be added to the rewards.
    """
    free_length = max_response_length - buffer_length
    excess = (lengths - free_length).float() / buffer_length
    return -penalty * excess.clamp(0.0, 1.0)


@dataclass(frozen=True)
class GroupAdvantages:
    """Per-sequence advantages and their groups.

    Attributes:
        values: [B], the rewards' dtype; exactly 0 without signal and where the reward does not count.
        groups: the group of each row.
        sizes: [B] int64; number of the sequences in the row's group that count.
        has_signal: [B] bool; the row counts and its group's rewards differ.
    """

    values: Tensor
    groups: Groups
    sizes: Tensor
    has_signal: Tensor

    def per_token(self, mask: Tensor) -> Tensor:
        """Expand to [B, T]: each token gets its response's advantage; exactly 0 where mask is False."""
        return torch.where(mask, self.values[:, None], self.values.new_zeros(()))


def group_advantages(
    batch: TokenBatch,
    *,
    normalization: RewardNormalization | Literal["mean"] = "group",
    eps: float = 1e-6,
    leave_one_out: bool = False,
) -> GroupAdvantages:
    """Centre each reward on its group and scale it.

    A_i = (r_i - mean_g r) / F,   F = 1 | std_g(r) + eps | std_batch(r) + eps | mean_g(r) + eps
    The std has ddof 1. With F = mean_g(r) + eps, a group whose mean is not above 0 has no signal.

    With ``leave_one_out`` mean and std are those of the *other* responses of the group, and a std of 0
    becomes 1: NeMo-RL's default estimator, kept for comparison; none of the papers uses it.

    Args:
        batch: the whole step, cleaned under the mask.
        normalization: F; "none" is 1.
        eps: added to F.
        leave_one_out: compare each response with the others of its group.
    Returns: `GroupAdvantages`.  Equal rewards within a group give exactly 0, whatever eps.
    """
    valid = batch.in_groups
    rewards = batch.rewards.double()
    groups = Groups.from_ids(batch.group_ids)
    # Signal is a difference of extremes. A std would see it in the rounding of equal rewards, too.
    highest = groups.spread(groups.extreme(rewards, valid, "amax"))
    lowest = groups.spread(groups.extreme(rewards, valid, "amin"))
    differs = valid & (highest > lowest)
    if leave_one_out:
        values = _leave_one_out(rewards, valid, groups, normalization, eps)
    else:
        values = groups.centred(rewards, valid)
        if normalization == "group":
            std = groups.spread(groups.std(rewards, valid))
            values = values / (std + eps)
        elif normalization == "batch":
            values = values / (row_std(rewards, valid) + eps)
        elif normalization == "mean":
            mean = groups.spread(groups.mean(rewards, valid))
            differs = differs & (mean > 0)
            values = values / (mean + eps)
    values = torch.where(differs, values, 0.0).to(batch.rewards.dtype)
    sizes = groups.spread(groups.sum(batch.sample_mask)).long()
    return GroupAdvantages(values, groups, sizes, differs & batch.sample_mask)


def _leave_one_out(rewards: Tensor, valid: Tensor, groups: Groups, normalization: str, eps: float) -> Tensor:
    """Compare each reward with the other rewards of its group: [B] float64.

    The sums run over the others themselves. Subtracting the reward from the group's sum would round.
    """
    if normalization in ("batch", "mean"):
        raise ValueError(
            f"leave_one_out with normalization={normalization!r} is not defined; use 'none' or 'group'"
        )
    values = torch.zeros_like(rewards)
    for group in range(groups.num_groups):
        rows = (valid & (groups.index == group)).nonzero()[:, 0]
        size = len(rows)
        if size < 2:
            continue
        # Row i of `peers` holds the rewards of all responses but i.
        group_rewards = rewards[rows]
        is_peer = ~torch.eye(size, dtype=torch.bool, device=rewards.device)
        peers = group_rewards.expand(size, size)[is_peer].view(size, size - 1)
        # r_i - r_j, whose mean over j is r_i less the mean of the peers, and exactly 0 for equal rewards.
        differences = group_rewards[:, None] - peers
        centred = differences.mean(1)
        if normalization == "group":
            squares = (differences - centred[:, None]).square().sum(1)
            std = (squares / max(size - 2, 1)).sqrt()
            peers_differ = peers.amax(1) > peers.amin(1)
            centred = centred / torch.where(peers_differ, std + eps, 1.0)
        values[rows] = centred
    return values


def implausible_advantage(prepared: PreparedBatch) -> str | None:
    """Name the step's largest advantage and its group if the rewards do not explain its size."""
    batch = prepared.batch
    magnitudes = torch.where(batch.mask, prepared.advantages.abs(), 0.0)
    if not magnitudes.numel():
        return None
    groups = Groups.from_ids(batch.group_ids)
    highest = groups.extreme(batch.rewards, batch.in_groups, "amax")
    lowest = groups.extreme(batch.rewards, batch.in_groups, "amin")
    # A group without a reward has the range -inf.
    ranges = groups.spread(highest - lowest).clamp(min=0)
    row = int((magnitudes.amax(1) / ranges.clamp(min=1)).argmax())
    column = int(magnitudes[row].argmax())
    advantage = float(prepared.advantages[row, column])
    reward_range = float(ranges[row])
    factor = max(PLAUSIBLE_ADVANTAGE, float(prepared.group_sizes[row]))
    limit = factor * max(reward_range, 1.0)
    if abs(advantage) <= limit:
        return None
    return (
        f"group {int(batch.group_ids[row])} has an advantage of {advantage:.6g} where its rewards span "
        f"{reward_range:.6g} (plausible: up to {limit:g}): something divides by a spread near 0; raise "
        "loss_fn.advantage_eps, set use_leave_one_out_baseline=false, or correct shape()"
    )
