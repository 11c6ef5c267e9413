"""Sums, means and z-scores over groups, buckets and whole steps. Accumulated in float64.

Values are centred in two steps: the largest is subtracted, then the mean of what is left. Equal values thus
give exactly 0 at any magnitude, and a divisor of 0 is the only sign of no spread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from nemo_grpo.core.lazy import Tensor, torch


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """Set ``x`` and its gradient to exactly 0 where ``mask`` is False; a product would keep NaN.

    Args:    x: [..., T] floating point.  mask: bool, of x's shape.
    Returns: of x's shape and dtype.
    """
    return torch.where(mask, x, x.new_zeros(()))


@dataclass(frozen=True)
class Groups:
    """The group of each row, ``index`` [B] int64, of P = ``num_groups``."""

    index: Tensor
    num_groups: int

    @classmethod
    def from_ids(cls, group_ids: Tensor) -> Self:
        """Number arbitrary integer ids densely."""
        ids, index = torch.unique(group_ids, return_inverse=True)
        return cls(index, ids.numel())

    @classmethod
    def one(cls, rows: Tensor) -> Self:
        """Put all rows into one group."""
        return cls(torch.zeros(len(rows), dtype=torch.int64, device=rows.device), 1)

    def sum(self, rows: Tensor) -> Tensor:
        """[B] -> [P] float64: sum of each group's rows."""
        empty = torch.zeros(self.num_groups, dtype=torch.float64, device=rows.device)
        return empty.index_add_(0, self.index, rows.double())

    def mean(self, rows: Tensor, valid: Tensor) -> Tensor:
        """[B] -> [P] float64: mean of each group's valid rows; 0 if none."""
        return self.sum(zero_outside(rows, valid)) / self.sum(valid).clamp(min=1)

    def centred(self, rows: Tensor, valid: Tensor) -> Tensor:
        """[B] -> [B] float64: every row minus the mean of its group's valid rows."""
        shifted = rows.double() - self.spread(_finite(self.extreme(rows, valid, "amax")))
        return shifted - self.spread(self.mean(shifted, valid))

    def std(self, rows: Tensor, valid: Tensor) -> Tensor:
        """[B] -> [P] float64: sample standard deviation (ddof 1) of each group's valid rows; 0 below two."""
        squares = self.sum(zero_outside(self.centred(rows, valid).square(), valid))
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


def _finite(highest: Tensor) -> Tensor:
    return torch.where(highest.isfinite(), highest, 0.0)


def row_std(rows: Tensor, valid: Tensor) -> Tensor:
    """[B] -> 0-d float64: sample standard deviation (ddof 1) of the valid rows; 0 below two."""
    return Groups.one(rows).std(rows, valid)[0]


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] float64: sum over the tokens that count."""
    return zero_outside(x, mask).sum(1, dtype=torch.float64)


def row_max(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] float64: highest of the tokens that count; 0 if none do."""
    filled = torch.where(mask, x.detach(), float("-inf"))
    return _finite(filled.amax(1).double()) if x.shape[1] else x.new_zeros(len(x), dtype=torch.float64)


def row_centred(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B, T] float64: every token minus its row's mean over the tokens that count; 0 elsewhere."""
    shifted = x.double() - row_max(x, mask)[:, None]
    mean = row_sum(shifted, mask) / mask.sum(1).clamp(min=1)
    return zero_outside(shifted - mean[:, None], mask)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> 0-d float64: mean over the tokens that count; 0 if none do."""
    return row_sum(x, mask).sum() / mask.sum().clamp(min=1)


def token_centred(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B, T] float64: every token minus the mean over all that count; 0 elsewhere."""
    return group_token_centred(x, mask, Groups.one(x))


def token_std(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> 0-d float64: population standard deviation (ddof 0) over the tokens that count."""
    return group_token_std(x, mask, Groups.one(x))[0]


def group_token_mean(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """[B, T] -> [P] float64: mean over all tokens of each group that count; 0 where a group has none."""
    return groups.sum(row_sum(x, mask)) / groups.sum(mask.sum(1)).clamp(min=1)


def group_token_centred(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """[B, T] -> [B, T] float64: every token minus the mean of its group's that count; 0 elsewhere."""
    has_tokens = mask.any(1)
    highest = _finite(groups.extreme(row_max(x, mask), has_tokens, "amax"))
    shifted = x.double() - groups.spread(highest)[:, None]
    return zero_outside(shifted - groups.spread(group_token_mean(shifted, mask, groups))[:, None], mask)


def group_token_std(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """[B, T] -> [P] float64: population std (ddof 0) over all tokens of each group that count."""
    return group_token_mean(group_token_centred(x, mask, groups).square(), mask, groups).sqrt()


def segment_zscore(x: Tensor, mask: Tensor, segments: Tensor, num_segments: int, delta: float) -> Tensor:
    """Standardise every token within its segment.

    z = (x - mean_S) / (std_S + delta), population std (ddof 0).

    Args:    x: [B, T].  mask: [B, T] bool.  segments: [B, T] int64 in [0, num_segments); ignored where mask
             is False.
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and where the segment has no spread.
    """
    places = mask.flatten().nonzero()[:, 0]  # once: indexing by a mask searches it every time
    where, values = (tensor.flatten().index_select(0, places) for tensor in (segments, x))
    tokens, every = Groups(where, num_segments), torch.ones_like(where, dtype=torch.bool)
    centred = tokens.centred(values, every)
    count = torch.bincount(where, minlength=num_segments).clamp(min=1)
    std = (torch.bincount(where, weights=centred.square(), minlength=num_segments) / count).sqrt()
    z = _standardised(centred, tokens.spread(std), delta)
    out = torch.zeros(mask.numel(), dtype=x.dtype, device=x.device)
    return out.index_copy_(0, places, z.to(x.dtype)).view_as(mask)


def group_zscore(x: Tensor, mask: Tensor, groups: Groups, delta: float) -> Tensor:
    """Compute `segment_zscore` with each group as a segment; faster, since a row lies in one group.

    Args:    x, mask: [B, T].
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and in a group without spread.
    """
    centred = group_token_centred(x, mask, groups)
    std = groups.spread(group_token_mean(centred.square(), mask, groups).sqrt())[:, None]
    return _standardised(centred, std, delta).to(x.dtype)


def _standardised(centred: Tensor, std: Tensor, delta: float) -> Tensor:
    return centred / torch.where(std > 0, std + delta, 1.0)


def moving_moments(x: Tensor, mask: Tensor, before: Mapping[str, float], momentum: float) -> dict[str, float]:
    """Update the exponentially weighted mean and variance of tokens over steps.

    mean = m mean_before + (1 - m) mean_now,
    var = m var_before + (1 - m) var_now + m (1 - m) (mean_now - mean_before)^2,  m the momentum

    Args:    x, mask: [B, T], the whole step.  before: what the previous step returned; empty: none.
    Returns: ``mean`` and ``variance``; after the first step its own, unchanged by a step without tokens.
    """
    if not mask.any():
        return dict(before)
    mean, variance = float(token_mean(x, mask)), float(token_std(x, mask)) ** 2
    if not before:
        return {"mean": mean, "variance": variance}
    moved = mean - before["mean"]
    return {
        "mean": before["mean"] + (1 - momentum) * moved,
        "variance": momentum * before["variance"] + (1 - momentum) * (variance + momentum * moved**2),
    }


def percentiles(values: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """Find nearest-rank percentiles of a 1-D tensor of any size (torch.quantile stops at 16 million)."""
    if values.numel() == 0:
        return [values.new_zeros(()) for _ in shares]
    places = [round(share * (values.numel() - 1)) for share in shares]
    if values.is_cuda:
        return list(values.sort().values[places])
    ordered = values.detach().clone()
    ordered.numpy().partition(places)  # in place, and a quarter of the time of torch's sort
    return list(ordered[places])
