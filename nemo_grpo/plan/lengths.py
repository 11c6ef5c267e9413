"""Lengths of prompts and responses: a step waits for its longest response, not for the mean one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import Any

from nemo_grpo.support.errors import UserError

SPREAD = 0.6
"""Standard deviation of the logarithm of a response's length, if only the mean is given."""

PROMPT = 128
"""Mean tokens of a prompt, if not given."""

NUM_CLASSES = 64
"""Number of quantiles that stand for the distribution of the responses' lengths."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes:
        prompt: mean length of the prompts.
        responses: ascending quantiles of the responses' lengths; equally many responses have each length.
        limit: longest possible response.
        source: origin of the lengths, for the table.
    """

    prompt: float
    responses: tuple[float, ...]
    limit: int
    source: str = ""

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def mean_sequence(self) -> float:
        """Mean tokens of prompt and response."""
        return self.prompt + self.mean

    @cached_property
    def attended(self) -> float:
        """Mean number of tokens that a token attends to.

        A token in a causal sequence of s tokens attends to s / 2 on average; the mean over all tokens is
        E[s^2] / (2 E[s]).
        """
        sequences = [self.prompt + length for length in self.responses]
        return sum(s * s for s in sequences) / sum(sequences) / 2

    def longest(self, num_samples: int) -> float:
        """Estimate the longest of ``num_samples`` responses: the quantile num_samples / (num_samples + 1).

        Interpolates linearly between the quantiles, and from the last one to the limit.
        """
        num_classes = len(self.responses)
        # A quantile stands for the middle of its class, so the first is at half a class.
        position = num_samples / (num_samples + 1) * num_classes - 0.5
        if position <= 0:
            return self.responses[0]
        index = min(int(position), num_classes - 1)
        below = self.responses[index]
        if index + 1 < num_classes:
            return below + (position - index) * (self.responses[index + 1] - below)
        # From the last quantile it is half a class to the limit.
        return below + (position - index) * 2 * (self.limit - below)

    def packed(self, capacity: int) -> float:
        """Estimate the mean tokens of a packed row of this capacity.

        Packs two responses of each quantile by first-fit decreasing.
        """
        return _packed(tuple(self.prompt + length for length in self.responses), capacity)


@lru_cache(maxsize=512)
def _packed(lengths: tuple[float, ...], capacity: int) -> float:
    """Compute the mean tokens of a row after first-fit decreasing."""
    # Cached, because a search of layouts asks for the same lengths and capacity thousands of times.
    two_of_each = lengths * 2
    sizes = [min(size, capacity) for size in two_of_each]
    row_sizes: list[float] = []
    for size in sorted(sizes, reverse=True):
        for row, used in enumerate(row_sizes):
            if used + size <= capacity:
                row_sizes[row] += size
                break
        else:
            row_sizes.append(size)
    return sum(row_sizes) / len(row_sizes)


def of_mean(mean: float, limit: int, prompt: float = PROMPT, source: str = "") -> Lengths:
    """Make log-normal lengths, cut at the limit, with this mean after the cut."""
    if not 1 <= mean <= limit:
        raise UserError(
            f"--lengths {mean:g}: responses have 1 to {limit} tokens (max_new_tokens); give their mean"
        )
    normal = NormalDist(0, SPREAD)
    log_quantiles = [normal.inv_cdf((i + 0.5) / NUM_CLASSES) for i in range(NUM_CLASSES)]

    def quantiles(median: float) -> tuple[float, ...]:
        return tuple(min(max(median * exp(log), 1.0), limit) for log in log_quantiles)

    # The cut lowers the mean by an amount without a formula, so the median is found by bisection.
    low = 1e-3
    high = 1e3 * limit
    for _ in range(60):
        middle = (low * high) ** 0.5
        if sum(quantiles(middle)) < mean * NUM_CLASSES:
            low = middle
        else:
            high = middle
    return Lengths(prompt, quantiles(high), limit, source or "as --lengths says")


def read_lengths(path: Path, limit: int, prompt: float = PROMPT) -> Lengths:
    """Read a run's lengths from samples.jsonl (each response) or metrics.jsonl (means of its steps)."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"--lengths {path}: {error}; give a number, metrics.jsonl or samples.jsonl"
        ) from error
    rows = [row for row in rows if isinstance(row, dict)]
    lengths = _sample_lengths(rows)
    if lengths:
        _check(path, lengths, limit)
        return Lengths(prompt, _quantiles(lengths), limit, f"{len(lengths)} samples of {path}")
    means = [float(row[MEAN_KEY]) for row in rows if isinstance(row.get(MEAN_KEY), int | float)]
    if means:
        _check(path, means, limit)
        return of_mean(sum(means) / len(means), limit, prompt, f"{len(means)} steps of {path}")
    raise UserError(
        f"--lengths {path}: no {SAMPLE_KEY} and no {MEAN_KEY} in it; give a run's own file or a mean"
    )


SAMPLE_KEY = "num_tokens"
"""Key of samples.jsonl."""

MEAN_KEY = "length/mean"
"""Key of metrics.jsonl."""


def _sample_lengths(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Collect the lengths of the responses in samples.jsonl, except those of validations."""
    lengths = []
    for row in rows:
        if "validation" in row:
            continue
        # Training writes a row per response. An evaluation writes a row per problem, with a list.
        value = row.get(SAMPLE_KEY)
        numbers = value if isinstance(value, list) else [value]
        lengths += [float(number) for number in numbers if isinstance(number, int | float)]
    return lengths


def _check(path: Path, lengths: Sequence[float], limit: int) -> None:
    worst = max(lengths) if max(lengths) > limit else min(lengths)
    if not 0 < worst <= limit:
        raise UserError(
            f"--lengths {path}: a response of {worst:g} tokens, the recipe allows 1 to {limit}; raise "
            "policy.generation.max_new_tokens, or give another file"
        )


def _quantiles(lengths: Sequence[float]) -> tuple[float, ...]:
    """Reduce many lengths to those in the middle of `NUM_CLASSES` equal classes."""
    ordered = sorted(lengths)
    if len(ordered) <= NUM_CLASSES:
        return tuple(ordered)
    return tuple(ordered[int((i + 0.5) / NUM_CLASSES * len(ordered))] for i in range(NUM_CLASSES))
