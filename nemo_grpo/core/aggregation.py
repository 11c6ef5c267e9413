"""From per-token terms to one number, by global counts, so sums over microbatches and ranks are exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from nemo_grpo.core.lazy import torch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    terms: Tensor,
    counts: Tensor,
    how: Aggregation,
    *,
    global_valid_toks: Tensor | float,
    global_valid_seqs: Tensor | float,
    max_response_length: int | None = None,
) -> Tensor:
    """This part's contribution to the step's aggregate; contributions of all parts add up to the whole.

    token_mean:     sum / N
    sequence_mean:  sum over sequences of (sum of its tokens / its number of tokens), / number of valid
        sequences
    constant:       sum / (number of valid sequences x max_response_length)      (Dr.GRPO)

    Args:    terms: [B, T]; finite where nothing counts, because they are made of a clean batch (then a
             product is exact).  counts: [B, T], 1 for the tokens that count, else 0.
             global_valid_*: counts over the whole step, all microbatches and ranks.
    Returns: 0-d; 0 if nothing counts.  An empty response adds 0 and still counts as a sequence.
    Raises:  ValueError: constant without max_response_length.
    """
    counted = terms * counts
    if how == "token_mean":
        return counted.sum() / _at_least_one(global_valid_toks)
    if how == "sequence_mean":
        return (counted.sum(1) / counts.sum(1).clamp(min=1)).sum() / _at_least_one(global_valid_seqs)
    if max_response_length is None:
        raise ValueError("aggregation='constant' divides by max_response_length; set it")
    return counted.sum() / (_at_least_one(global_valid_seqs) * max_response_length)


def metric_shares(
    metrics: Mapping[str, Tensor],
    counts: Tensor,
    global_valid_toks: Tensor | float,
    global_valid_seqs: Tensor | float,
) -> dict[str, Tensor]:
    """This part's share of each metric's mean over the step's tokens ([B, T]) or sequences ([B]).

    Args:    metrics: without gradient; finite where nothing counts, as in `aggregate`. What is 0-d already
             stays.  counts: as in `aggregate`.
    Returns: name -> 0-d.
    """
    shares = {name: value for name, value in metrics.items() if value.dim() == 0}
    for dim, size in ((2, global_valid_toks), (1, global_valid_seqs)):
        of_dim = {name: value for name, value in metrics.items() if value.dim() == dim}
        if of_dim:
            factors = (counts if dim == 2 else counts.any(1).to(counts.dtype)).flatten()
            sums = [torch.dot(value.flatten(), factors.to(value.dtype)) for value in of_dim.values()]
            shares |= zip(of_dim, (torch.stack(sums) / _at_least_one(size)).unbind(), strict=True)
    return shares


def _at_least_one(count: Tensor | float) -> Tensor | float:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
