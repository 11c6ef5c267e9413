"""Sums, means and z-scores over groups, buckets and whole steps. Accumulated in float64."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.masking import zero_outside

# Spread below this share of the magnitude is rounding, not signal (float64 accumulation keeps about 1e-16).
_NO_SPREAD = 1e-10


@dataclass(frozen=True)
class Groups:
    """Which group each row belongs to, numbered 0..num_groups-1.

    Attributes: index: [B] int64.  num_groups: P.
    """

    index: Tensor
    num_groups: int

    @classmethod
    def from_ids(cls, group_ids: Tensor) -> Self:
        """Number arbitrary integer ids densely."""
        ids, index = torch.unique(group_ids, return_inverse=True)
        return cls(index, ids.numel())

    def sum(self, rows: Tensor) -> Tensor:
        """[B] -> [P] float64: sum of each group's rows."""
        return torch.zeros(self.num_groups, dtype=torch.float64, device=rows.device).index_add_(
            0, self.index, rows.double()
        )

    def mean(self, rows: Tensor, valid: Tensor) -> Tensor:
        """[B] -> [P] float64: mean of each group's valid rows; 0 if none."""
        return self.sum(zero_outside(rows, valid)) / self.sum(valid).clamp(min=1)

    def std(self, rows: Tensor, valid: Tensor) -> Tensor:
        """[B] -> [P] float64: sample standard deviation (ddof 1) of each group's valid rows; 0 below two."""
        centred = rows.double() - self.spread(self.mean(rows, valid))
        squares = self.sum(zero_outside(centred.square(), valid))
        return (squares / (self.sum(valid) - 1).clamp(min=1)).sqrt()

    def extreme(self, rows: Tensor, valid: Tensor, kind: str) -> Tensor:
        """[B] -> [P] float64: each group's ``amin`` or ``amax`` over its valid rows; +-inf if none."""
        start = float("inf") if kind == "amin" else float("-inf")
        filled = torch.where(valid, rows.double(), start)
        out = torch.full((self.num_groups,), start, dtype=torch.float64, device=rows.device)
        return out.scatter_reduce_(0, self.index, filled, kind)

    def spread(self, per_group: Tensor) -> Tensor:
        """[P] -> [B]: each row gets its group's value."""
        return per_group[self.index]


def row_std(rows: Tensor, valid: Tensor) -> Tensor:
    """[B] -> 0-d float64: sample standard deviation (ddof 1) of the valid rows; 0 below two."""
    num_valid = valid.sum()
    centred = rows.double() - zero_outside(rows.double(), valid).sum() / num_valid.clamp(min=1)
    return (zero_outside(centred.square(), valid).sum() / (num_valid - 1).clamp(min=1)).sqrt()


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] float64: sum over the tokens that count."""
    return zero_outside(x, mask).sum(1, dtype=torch.float64)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> 0-d float64: mean over the tokens that count; 0 if none do."""
    return row_sum(x, mask).sum() / mask.sum().clamp(min=1)


def token_std(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> 0-d float64: population standard deviation (ddof 0) over the tokens that count."""
    centred = x.double() - token_mean(x, mask)
    return (row_sum(centred.square(), mask).sum() / mask.sum().clamp(min=1)).sqrt()


def group_token_mean(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """[B, T] -> [P] float64: mean over all tokens of each group that count; 0 where a group has none."""
    return groups.sum(row_sum(x, mask)) / groups.sum(mask.sum(1)).clamp(min=1)


def group_token_std(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """[B, T] -> [P] float64: population std (ddof 0) over all tokens of each group that count."""
    centred = x.double() - groups.spread(group_token_mean(x, mask, groups))[:, None]
    return group_token_mean(centred.square(), mask, groups).sqrt()


def segment_zscore(x: Tensor, mask: Tensor, segments: Tensor, num_segments: int, delta: float) -> Tensor:
    """Standardise every token within its segment.

    z = (x - mean_S) / (std_S + delta), population std (ddof 0).

    Args:    x: [B, T].  mask: [B, T] bool.  segments: [B, T] int64 in [0, num_segments); ignored where mask
             is False.
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and where the segment has no spread.
    """
    places = mask.flatten().nonzero()[:, 0]  # found once: a mask as an index is searched at every use
    where, values = (tensor.flatten().index_select(0, places) for tensor in (segments, x))
    count = torch.bincount(where, minlength=num_segments).clamp(min=1)
    mean = torch.bincount(where, weights=values.double(), minlength=num_segments) / count
    centred = values - mean.index_select(0, where)
    std = (torch.bincount(where, weights=centred.square(), minlength=num_segments) / count).sqrt()
    scale = torch.where(std > _NO_SPREAD * (1 + mean.abs()), std + delta, float("inf"))  # x / inf = 0
    z = centred.div_(scale.index_select(0, where))
    return (
        torch.zeros(mask.numel(), dtype=x.dtype, device=x.device)
        .index_copy_(0, places, z.to(x.dtype))
        .view_as(mask)
    )


def group_zscore(x: Tensor, mask: Tensor, groups: Groups, delta: float) -> Tensor:
    """`segment_zscore` with each group as a segment, faster: a row lies in one group.

    Args:    x, mask: [B, T].
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and in a group without spread.
    """
    mean = groups.spread(group_token_mean(x, mask, groups))[:, None]
    centred = x.double() - mean
    std = groups.spread(group_token_mean(centred.square(), mask, groups).sqrt())[:, None]
    has_spread = std > _NO_SPREAD * (1 + mean.abs())
    return zero_outside(centred.div_(std + delta).to(x.dtype), mask & has_spread)


def moving_moments(x: Tensor, mask: Tensor, before: Mapping[str, float], momentum: float) -> dict[str, float]:
    """Exponentially weighted mean and mean square of tokens over steps.

    moving = momentum moving_before + (1 - momentum) moments of this step's tokens

    Args:    x, mask: [B, T], the whole step.  before: what the previous step returned; empty: none.
    Returns: ``mean`` and ``square``; after the first step its own, unchanged by a step without tokens.
    """
    if not mask.any():
        return dict(before)
    now = {"mean": float(token_mean(x, mask)), "square": float(token_mean(x.double().square(), mask))}
    return {key: momentum * before.get(key, value) + (1 - momentum) * value for key, value in now.items()}


def percentiles(values: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """Nearest-rank percentiles of a 1-D tensor of any size (torch.quantile stops at 16 million)."""
    if values.numel() == 0:
        return [values.new_zeros(()) for _ in shares]
    places = [round(share * (values.numel() - 1)) for share in shares]
    if values.is_cuda:
        return list(values.sort().values[places])
    ordered = values.detach().clone()
    ordered.numpy().partition(places)  # in place, and a quarter of the time of torch's sort
    return list(ordered[places])
