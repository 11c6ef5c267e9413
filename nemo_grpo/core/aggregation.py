"""Reduce per-token terms to one number by global counts, so that microbatches and ranks simply add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from nemo_grpo.core.lazy import Tensor, torch

if TYPE_CHECKING:
    from nemo_grpo.core.batch import TokenBatch
    from nemo_grpo.core.statistics import Groups

Aggregation = Literal["token_mean", "group_token_mean", "sequence_mean", "constant"]


def aggregate(
    terms: Tensor,
    counts: Tensor,
    how: Aggregation,
    *,
    global_valid_toks: Tensor | float,
    global_valid_seqs: Tensor | float,
    max_response_length: int | None = None,
    row_factors: Tensor | None = None,
) -> Tensor:
    """Reduce one part of a step; the results of all parts add up to the whole step's.

    token_mean:        sum / N
    group_token_mean:  mean over prompt groups of (sum of the group's tokens / their number)
    sequence_mean:     sum over sequences of (sum of its tokens / its number of tokens), / number of valid
        sequences
    constant:          sum / (number of valid sequences x max_response_length)      (Dr.GRPO)

    Args:
        terms: [B, T]; finite outside the mask, as in a clean batch.
        counts: [B, T], 1 for the tokens that count, else 0.
        how: the reduction.
        global_valid_toks: tokens that count in the whole step, in all microbatches and on all ranks.
        global_valid_seqs: sequences that count in the whole step.
        max_response_length: tokens; for constant.
        row_factors: [B], of `group_mean_factors`; for group_token_mean.
    Returns: 0-d; 0 if nothing counts.  An empty response adds 0 and still counts as a sequence.
    """
    counted = terms * counts
    if how == "token_mean":
        return counted.sum() / _at_least_one(global_valid_toks)
    if how == "group_token_mean":
        if row_factors is None:
            raise ValueError("aggregation='group_token_mean' needs the step's row_factors; prepare the batch")
        return (counted.sum(1) * row_factors).sum() / _at_least_one(global_valid_seqs)
    if how == "sequence_mean":
        sequence_means = counted.sum(1) / counts.sum(1).clamp(min=1)
        return sequence_means.sum() / _at_least_one(global_valid_seqs)
    if max_response_length is None:
        raise ValueError("aggregation='constant' divides by max_response_length; set it")
    return counted.sum() / (_at_least_one(global_valid_seqs) * max_response_length)


def group_mean_factors(batch: TokenBatch, groups: Groups) -> Tensor:
    """Compute each row's token weight in a mean over groups: (sequences / groups) / tokens of its group.

    The weighted tokens, summed and divided by the number of sequences, give the mean over groups, so a loss
    needs only the step's counts. If all groups have the same size, an update on some of the groups, each of
    them whole, gets the mean over its own groups.

    Args:
        batch: the whole step.
        groups: the groups of its rows.
    Returns: [B], the logprobs' dtype. A group without a valid token does not count.
    """
    tokens = groups.sum(batch.mask.sum(1))  # [P]
    num_groups = (tokens > 0).sum().clamp(min=1)
    num_sequences = batch.sample_mask.sum().double()
    factors = num_sequences / num_groups / tokens.clamp(min=1)
    return groups.spread(factors).to(batch.prev_logprobs.dtype)


def metric_shares(
    metrics: Mapping[str, Tensor],
    counts: Tensor,
    global_valid_toks: Tensor | float,
    global_valid_seqs: Tensor | float,
) -> dict[str, Tensor]:
    """Compute this part's share of each metric's mean over the step's tokens ([B, T]) or sequences ([B]).

    Args:
        metrics: without gradient; finite off the mask, as in `aggregate`. A 0-d metric is returned unchanged.
        counts: [B, T], 1 for the tokens that count, else 0.
        global_valid_toks: tokens that count in the whole step.
        global_valid_seqs: sequences that count in the whole step.
    Returns: name -> 0-d.
    """
    per_token = {name: value for name, value in metrics.items() if value.dim() == 2}
    per_sequence = {name: value for name, value in metrics.items() if value.dim() == 1}
    shares = {name: value for name, value in metrics.items() if value.dim() == 0}
    shares |= _mean_shares(per_token, counts, global_valid_toks)
    if per_sequence:
        shares |= _mean_shares(per_sequence, counts.any(1).to(counts.dtype), global_valid_seqs)
    return shares


def _mean_shares(
    metrics: Mapping[str, Tensor], counts: Tensor, global_count: Tensor | float
) -> dict[str, Tensor]:
    """Sum each metric over the elements that count, and divide by their number in the whole step."""
    if not metrics:
        return {}
    # A dot product needs no [B, T] product in memory, and one stack divides all metrics by one kernel.
    factors = counts.flatten()
    sums = [torch.dot(value.flatten(), factors.to(value.dtype)) for value in metrics.values()]
    means = torch.stack(sums) / _at_least_one(global_count)
    return dict(zip(metrics, means.unbind(), strict=True))


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """Replace 0 by 1, so that a step without tokens has loss 0 and no NaN."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
