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
    """Assignment of B rows to P groups.

    Attributes:
        index: [B] int64, the group of each row, in [0, P).
        num_groups: P.
    """

    index: Tensor
    num_groups: int

    @classmethod
    def from_ids(cls, group_ids: Tensor) -> Self:
        """Number arbitrary integer ids densely."""
        ids, index = torch.unique(group_ids, return_inverse=True)
        return cls(index, ids.numel())

    @classmethod
    def single(cls, rows: Tensor) -> Self:
        """Put all rows into one group."""
        return cls(torch.zeros(len(rows), dtype=torch.int64, device=rows.device), 1)

    def sum(self, rows: Tensor) -> Tensor:
        """Sum the rows of each group: [B] -> [P] float64."""
        zeros = torch.zeros(self.num_groups, dtype=torch.float64, device=rows.device)
        return zeros.index_add(0, self.index, rows.double())

    def mean(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Average the valid rows of each group: [B] -> [P] float64; 0 for a group without any."""
        return self.sum(zero_outside(rows, valid)) / self.sum(valid).clamp(min=1)

    def centred(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Subtract from each row the mean of its group's valid rows: [B] -> [B] float64."""
        highest = _zero_if_infinite(self.extreme(rows, valid, "amax"))
        shifted = rows.double() - self.spread(highest)
        return shifted - self.spread(self.mean(shifted, valid))

    def std(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Compute the standard deviation (ddof 1) of each group's valid rows: [B] -> [P] float64.

        It is 0 for a group of fewer than two.
        """
        squares = self.sum(zero_outside(self.centred(rows, valid).square(), valid))
        degrees_of_freedom = (self.sum(valid) - 1).clamp(min=1)
        return (squares / degrees_of_freedom).sqrt()

    def extreme(self, rows: Tensor, valid: Tensor, kind: str) -> Tensor:
        """Find the ``amin`` or ``amax`` of each group's valid rows: [B] -> [P] float64.

        A group without a valid row has +inf for ``amin`` and -inf for ``amax``.
        """
        neutral = float("inf") if kind == "amin" else float("-inf")
        filled = torch.where(valid, rows.double(), neutral)
        extremes = torch.full((self.num_groups,), neutral, dtype=torch.float64, device=rows.device)
        return extremes.scatter_reduce(0, self.index, filled, kind)

    def spread(self, per_group: Tensor) -> Tensor:
        """Give each row the value of its group: [P] -> [B]."""
        return per_group[self.index]


def _zero_if_infinite(highest: Tensor) -> Tensor:
    """Replace the extreme of an empty group, which is infinite, by 0."""
    return torch.where(highest.isfinite(), highest, 0.0)


def row_std(rows: Tensor, valid: Tensor) -> Tensor:
    """Compute the sample standard deviation (ddof 1) of the valid rows: [B] -> 0-d float64; 0 below two."""
    return Groups.single(rows).std(rows, valid)[0]


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum the tokens of each row that count: [B, T] -> [B] float64."""
    return zero_outside(x, mask).sum(1, dtype=torch.float64)


def row_max(x: Tensor, mask: Tensor) -> Tensor:
    """Find the highest value of each row's counting tokens: [B, T] -> [B] float64; 0 if none count."""
    if x.shape[1] == 0:  # torch finds no maximum of an empty dimension
        return x.new_zeros(len(x), dtype=torch.float64)
    filled = torch.where(mask, x.detach(), float("-inf"))
    return _zero_if_infinite(filled.amax(1).double())


def row_centred(x: Tensor, mask: Tensor) -> Tensor:
    """Subtract each row's mean over its counting tokens: [B, T] -> [B, T] float64; 0 off the mask."""
    shifted = x.double() - row_max(x, mask)[:, None]
    mean = row_sum(shifted, mask) / mask.sum(1).clamp(min=1)
    return zero_outside(shifted - mean[:, None], mask)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average all counting tokens: [B, T] -> 0-d float64; 0 if none count."""
    return row_sum(x, mask).sum() / mask.sum().clamp(min=1)


def token_centred(x: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean over all counting tokens: [B, T] -> [B, T] float64; 0 off the mask."""
    return group_token_centred(x, mask, Groups.single(x))


def token_std(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the standard deviation (ddof 0) of all counting tokens: [B, T] -> 0-d float64."""
    return group_token_std(x, mask, Groups.single(x))[0]


def group_token_mean(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Average the counting tokens of each group: [B, T] -> [P] float64; 0 for a group without any."""
    num_tokens = groups.sum(mask.sum(1)).clamp(min=1)
    return groups.sum(row_sum(x, mask)) / num_tokens


def group_token_centred(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Subtract from each token the mean over its group's counting tokens: [B, T] float64; 0 off the mask."""
    has_tokens = mask.any(1)
    highest = _zero_if_infinite(groups.extreme(row_max(x, mask), has_tokens, "amax"))
    shifted = x.double() - groups.spread(highest)[:, None]
    mean = groups.spread(group_token_mean(shifted, mask, groups))
    return zero_outside(shifted - mean[:, None], mask)


def group_token_std(x: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Compute the standard deviation (ddof 0) of each group's counting tokens: [B, T] -> [P] float64."""
    variance = group_token_mean(group_token_centred(x, mask, groups).square(), mask, groups)
    return variance.sqrt()


def segment_zscore(x: Tensor, mask: Tensor, segments: Tensor, num_segments: int, delta: float) -> Tensor:
    """Standardise every token within its segment.

    z = (x - mean_S) / (std_S + delta), population std (ddof 0).

    Args:
        x: [B, T].
        mask: [B, T] bool.
        segments: [B, T] int64 in [0, num_segments); ignored where mask is False.
        num_segments: number of segments.
        delta: added to each segment's std.
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and where the segment has no spread.
    """
    # Positions of the N counting tokens, found once: indexing by a mask searches it every time.
    positions = mask.flatten().nonzero()[:, 0]
    token_segments = segments.flatten().index_select(0, positions)
    values = x.flatten().index_select(0, positions)
    tokens = Groups(token_segments, num_segments)  # each token is a row of its segment
    centred = tokens.centred(values, torch.ones_like(token_segments, dtype=torch.bool))
    num_tokens = torch.bincount(token_segments, minlength=num_segments).clamp(min=1)
    squares = torch.bincount(token_segments, weights=centred.square(), minlength=num_segments)
    std = (squares / num_tokens).sqrt()
    z = _standardised(centred, tokens.spread(std), delta)
    zeros = torch.zeros(mask.numel(), dtype=x.dtype, device=x.device)
    return zeros.index_copy(0, positions, z.to(x.dtype)).view_as(mask)


def group_zscore(x: Tensor, mask: Tensor, groups: Groups, delta: float) -> Tensor:
    """Compute `segment_zscore` with each group as a segment; faster, since a row lies in one group.

    Args:
        x: [B, T].
        mask: [B, T] bool.
        groups: the groups of the B rows.
        delta: added to each group's std.
    Returns: [B, T] in x's dtype; exactly 0 where mask is False and in a group without spread.
    """
    centred = group_token_centred(x, mask, groups)
    std = group_token_mean(centred.square(), mask, groups).sqrt()
    return _standardised(centred, groups.spread(std)[:, None], delta).to(x.dtype)


def _standardised(centred: Tensor, std: Tensor, delta: float) -> Tensor:
    """Divide by std + delta."""
    # Without spread the numerator is exactly 0; dividing it by 1 keeps it so for delta = 0, too.
    return centred / torch.where(std > 0, std + delta, 1.0)


def moving_moments(
    x: Tensor, mask: Tensor, previous: Mapping[str, float], momentum: float
) -> dict[str, float]:
    """Update the exponentially weighted mean and variance of tokens over steps.

    mean = m mean_previous + (1 - m) mean_now,
    var = m var_previous + (1 - m) var_now + m (1 - m) (mean_now - mean_previous)^2,  m the momentum

    Args:
        x: [B, T], the whole step.
        mask: [B, T] bool.
        previous: result of the previous step; empty before the first.
        momentum: weight of the previous steps, in [0, 1).
    Returns: ``mean`` and ``variance``. The first step's are its own. A step without tokens changes nothing.
    """
    if not mask.any():
        return dict(previous)
    mean = float(token_mean(x, mask))
    variance = float(token_std(x, mask)) ** 2
    if not previous:
        return {"mean": mean, "variance": variance}
    change = mean - previous["mean"]
    return {
        "mean": previous["mean"] + (1 - momentum) * change,
        "variance": momentum * previous["variance"] + (1 - momentum) * (variance + momentum * change**2),
    }


def percentiles(values: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """Find nearest-rank percentiles of a 1-D tensor of any size (torch.quantile stops at 16 million)."""
    if values.numel() == 0:
        return [values.new_zeros(()) for _ in shares]
    ranks = [round(share * (values.numel() - 1)) for share in shares]
    if values.is_cuda:
        return list(values.sort().values[ranks])
    # NumPy's partition takes a quarter of the time of torch's sort. It works in place on the tensor's memory.
    partitioned = values.detach().clone()
    partitioned.numpy().partition(ranks)
    return list(partitioned[ranks])
