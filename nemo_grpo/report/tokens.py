"""Covariance, gradient and entropy per token of a step, for diagnostics.jsonl.

Four quantities of every token that counts:

    c_it  = (logp_it - mean_t logp_i)(A_i - mean_g A)      CW-GRPO section 2.3; A over the group's std
    g_it  = N |d loss / d logp_it|                         the variant's own loss, its weights and KL included
    g_it (1 - pi_it)                                       bounds the token's gradient (TR-GRPO Theorem 3.2)
    H_it      entropy of the policy at the token, for the rows that it scored

N is the number of measured tokens. For GRPO, g is |A|. A step with more than `MAX_MEASURED` tokens is
measured on its first groups only, which bounds time and memory. The definition of c is the same for all
variants, so that their values can be compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.core.advantages import group_advantages
from nemo_grpo.core.batch import PreparedBatch, global_counts
from nemo_grpo.core.objective import Objective
from nemo_grpo.core.statistics import percentiles
from nemo_grpo.core.token_weights import group_covariance

TABLE_SHARES = (0.0001, 0.01, 0.2, 0.4, 1.0)
"""Shares of the positive and of the negative tokens: CW-GRPO Table 1."""
CURVE_SHARES = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of all tokens: CW-GRPO Figure 3."""
ENTROPIES = {"p5": 0.05, "p50": 0.5, "p80": 0.8, "p95": 0.95}
NUM_BINS = 10
"""Bins of the tokens' probability."""
MAX_MEASURED = 2**20
"""Tokens of a step that are measured, unless its first group alone has more."""
NUM_TOKENS = 100
"""Length of each token table."""
MIN_COUNT = 5
"""Minimum count of a token in a table."""
SMALLEST_SUM = 1e-30
"""Least divisor, so that the shares of a sum of 0 are 0."""


def token_diagnostics(
    objective: Objective, prepared: PreparedBatch, token_ids: Tensor, decode: Callable[[int], str]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Summarise the tokens of a prepared step. Random states and the step stay unchanged.

    Args:
        objective: objective of the variant.
        prepared: the whole step.
        token_ids: [B, T], token at each position of ``prepared``.
        decode: returns a token's text.

    Returns:
        The numbers ``tokens/*`` for metrics.jsonl, and an object for diagnostics.jsonl. Both are empty for a
        step without tokens.
    """
    prepared, token_ids = _bounded(prepared, token_ids)
    batch = prepared.batch
    mask = batch.mask
    if not mask.any():
        return {}, {}
    base = group_advantages(batch)
    token_covariance = group_covariance(batch.prev_logprobs, base.values, batch, base.groups, "response")
    # Double precision, because in float32 the running sums of a million tokens would lose small values.
    covariance = token_covariance[mask].double()
    probability = batch.prev_logprobs[mask].double().exp()
    coefficient = loss_gradients(objective, prepared)[mask].double()
    gradient = coefficient * (1 - probability)
    curve = {
        "covariance": top_shares(covariance.abs(), CURVE_SHARES),
        "gradient": top_shares(gradient, CURVE_SHARES),
    }
    row: dict[str, Any] = {
        "num_tokens": int(mask.sum()),
        "covariance": covariance_table(covariance),
        "cumulative": {"share": list(CURVE_SHARES), **curve},
        "probability": probability_bins(probability, coefficient, gradient),
        "tokens": token_tables(token_ids[mask], probability, covariance, gradient, decode),
    }
    numbers = {
        "tokens/covariance_top1_share": curve["covariance"][CURVE_SHARES.index(0.01)],
        "tokens/gradient_top1_share": curve["gradient"][CURVE_SHARES.index(0.01)],
        "tokens/gradient_cv": float(gradient.std(correction=0) / gradient.mean().clamp(min=SMALLEST_SUM)),
    }
    if batch.entropies is not None and batch.scored_mask.any():
        entropy = batch.entropies[batch.scored_mask].double()
        values = _floats(percentiles(entropy, tuple(ENTROPIES.values())))
        row["entropy"] = dict(zip(ENTROPIES, values, strict=True))
        numbers["tokens/entropy_p95"] = row["entropy"]["p95"]
        numbers["tokens/entropy_top5_share"] = top_shares(entropy, (0.05,))[0]
    return numbers, row


def _bounded(prepared: PreparedBatch, token_ids: Tensor) -> tuple[PreparedBatch, Tensor]:
    """Keep the first groups with at most `MAX_MEASURED` tokens in total, but at least one group."""
    batch = prepared.batch
    _, group_of_row = batch.group_ids.unique(return_inverse=True)
    tokens_of_row = batch.mask.sum(1).double()
    tokens_of_group = torch.bincount(group_of_row, weights=tokens_of_row)
    is_measured = tokens_of_group.cumsum(0) <= MAX_MEASURED
    is_measured[:1] = True
    if is_measured.all():
        return prepared, token_ids
    rows = torch.nonzero(is_measured[group_of_row]).flatten()
    return prepared.select(rows), token_ids[rows]


def loss_gradients(objective: Objective, prepared: PreparedBatch) -> Tensor:
    """Compute N |d loss / d logp| of each token before the step's first update, [B, T]; 0 outside the mask.

    N is the number of tokens in ``prepared``. The loss is the one that trains the policy, including its
    weights, KL and aggregation.
    """
    batch = prepared.batch
    logprobs = batch.prev_logprobs.detach().clone().requires_grad_()
    num_tokens, num_sequences = global_counts(batch)
    calls: list[Tensor] = [torch.arange(len(batch.rewards))]
    # As in training, a loss that needs whole groups gets one group per call.
    if objective.whole_groups_per_loss_call:
        calls = [torch.nonzero(batch.group_ids == group).flatten() for group in batch.group_ids.unique()]
    losses = []
    # The step is over, so the caller may have switched gradients off.
    with torch.enable_grad():
        for rows in calls:
            loss, _ = objective.loss(
                prepared.select(rows, next_token_logprobs=logprobs[rows]),
                global_valid_toks=num_tokens,
                global_valid_seqs=num_sequences,
            )
            losses.append(loss)
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), logprobs)
    return gradient.abs() * num_tokens


def top_shares(values: Tensor, shares: Sequence[float]) -> list[float]:
    """Compute which share of the total the largest values make up.

    Args:
        values: [N], >= 0, N >= 1.
        shares: for each number in the result, the share of the N values that are summed, in (0, 1]; at least
            one value is summed.
    """
    running = values.sort(descending=True).values.cumsum(0)
    total = running[-1].clamp(min=SMALLEST_SUM)
    return _floats([running[_index(share, len(values))] / total for share in shares])


def covariance_table(covariance: Tensor) -> dict[str, list[float]]:
    """Compute CW-GRPO's Table 1: the covariance that the most extreme share of tokens reaches, by sign.

    Args:
        covariance: [N], covariance of each token.

    Returns:
        share: `TABLE_SHARES`.
        positive: for each share, the smallest value among that share of the positive tokens with the largest
            values. The last share is all of them. 0 if no token is positive.
        negative: the same for the negative tokens.
    """
    table: dict[str, list[float]] = {"share": list(TABLE_SHARES)}
    for name, sign in (("positive", 1), ("negative", -1)):
        signed = sign * covariance
        magnitudes = signed[signed > 0].sort(descending=True).values
        if len(magnitudes) == 0:
            table[name] = [0.0] * len(TABLE_SHARES)
            continue
        reached = [magnitudes[_index(share, len(magnitudes))] for share in TABLE_SHARES]
        table[name] = [sign * magnitude for magnitude in _floats(reached)]
    return table


def probability_bins(probability: Tensor, coefficient: Tensor, gradient: Tensor) -> dict[str, list[float]]:
    """Compute statistics by probability, in `NUM_BINS` bins of equal width from 0 to 1.

    Args:
        probability: [N], pi of each token.
        coefficient: [N], g.
        gradient: [N], g (1 - pi).

    Returns:
        tokens: share of the tokens in each bin.
        coefficient: mean g in each bin.
        gradient: each bin's share of the sum of g (1 - pi).
    """
    # The clamp puts a probability of 1 into the last bin.
    bins = (probability * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    count = torch.bincount(bins, minlength=NUM_BINS).double()
    coefficient_sum = torch.bincount(bins, weights=coefficient, minlength=NUM_BINS)
    gradient_sum = torch.bincount(bins, weights=gradient, minlength=NUM_BINS)
    return {
        "tokens": _floats(count / count.sum()),
        "coefficient": _floats(coefficient_sum / count.clamp(min=1)),
        "gradient": _floats(gradient_sum / gradient_sum.sum().clamp(min=SMALLEST_SUM)),
    }


def token_tables(
    ids: Tensor, probability: Tensor, covariance: Tensor, gradient: Tensor, decode: Callable[[int], str]
) -> dict[str, list[list[Any]]]:
    """List extreme entries of the vocabulary, each as ``[text, count, mean probability, share]``.

    Entries must occur at least `MIN_COUNT` times. ``share`` is the entry's part of the sum of g (1 - pi) over
    all tokens; in the table ``covariance`` it is its part of the sum of |c|.

    Args:
        ids: [N], id of each token.
        probability: [N], pi of each token.
        covariance: [N], c.
        gradient: [N], g (1 - pi).
        decode: returns a token's text.

    Returns:
        likely: entries with the largest mean probability (TR-GRPO section 3.3).
        unlikely: entries with the smallest mean probability.
        covariance: entries with the largest share of the sum of |c|.
        gradient: entries with the largest share of the sum of g (1 - pi).
    """
    entries, entry_of_token, count = ids.unique(return_inverse=True, return_counts=True)
    mean = torch.bincount(entry_of_token, weights=probability) / count

    def share_of_sum(values: Tensor) -> Tensor:
        return torch.bincount(entry_of_token, weights=values) / values.sum().clamp(min=SMALLEST_SUM)

    covariance_share = share_of_sum(covariance.abs())
    gradient_share = share_of_sum(gradient)
    frequent = (count >= MIN_COUNT).nonzero()[:, 0]

    def table(order: Tensor, share: Tensor) -> list[list[Any]]:
        """List the frequent entries with the largest ``order``. Equal ones are sorted by id."""
        ranking = order[frequent].argsort(descending=True, stable=True)
        top = frequent[ranking][:NUM_TOKENS]
        columns = (entries[top].tolist(), count[top].tolist(), mean[top].tolist(), share[top].tolist())
        rows = []
        for token, token_count, token_mean, token_share in zip(*columns, strict=True):
            rows.append([decode(token), token_count, round(token_mean, 4), round(token_share, 5)])
        return rows

    return {
        "likely": table(mean, gradient_share),
        "unlikely": table(-mean, gradient_share),
        "covariance": table(covariance_share, covariance_share),
        "gradient": table(gradient_share, gradient_share),
    }


def _index(share: float, number: int) -> int:
    """Return the index of the last of the first ``share`` of ``number`` values, which are at least one."""
    return min(number, max(1, round(share * number))) - 1


def _floats(values: Sequence[Tensor] | Tensor) -> list[float]:
    """Round the values to six digits, which are enough for a plot."""
    if not isinstance(values, Tensor):
        values = torch.stack(list(values)) if values else torch.zeros(0)
    return [float(f"{value:.6g}") for value in values.tolist()]
