"""Lengths of prompts and responses: a step waits for its longest response, not for the mean one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp
from pathlib import Path
from statistics import NormalDist

from nemo_grpo.support.errors import UserError

SPREAD = 0.6
"""Standard deviation of the logarithm of a response's length, if only the mean is given."""

PROMPT = 128
"""Mean tokens of a prompt, if not given."""

NUM_CLASSES = 64


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes: prompt: mean.  responses: ascending quantiles, equally many responses at each.
                limit: longest possible response.  source: of the lengths, for the table.
    """

    prompt: float
    responses: tuple[float, ...]
    limit: int
    source: str = ""

    @cached_property
    def mean(self) -> float:
        return sum(self.responses) / len(self.responses)

    @cached_property
    def mean_sequence(self) -> float:
        return self.prompt + self.mean

    @cached_property
    def attended(self) -> float:
        """Mean tokens that a token attends to: E[s^2] / 2 E[s], with s of prompt and response."""
        total = [self.prompt + length for length in self.responses]
        return sum(s * s for s in total) / sum(total) / 2

    def longest(self, num_samples: int) -> float:
        """Estimate the longest of ``num_samples`` responses: the quantile num_samples / (num_samples + 1).

        Interpolates linearly between the quantiles, and from the last one to the limit.
        """
        classes = len(self.responses)
        position = num_samples / (num_samples + 1) * classes - 0.5
        if position <= 0:
            return self.responses[0]
        below = min(int(position), classes - 1)
        above = self.responses[below + 1] if below + 1 < classes else self.limit
        weight = (position - below) * (1 if below + 1 < classes else 2)
        return self.responses[below] + weight * (above - self.responses[below])

    def packed(self, capacity: int) -> float:
        """Estimate mean tokens of a packed row: first-fit decreasing over two responses of each quantile."""
        return _packed(tuple(self.prompt + length for length in self.responses), capacity)


@lru_cache(maxsize=512)
def _packed(lengths: tuple[float, ...], capacity: int) -> float:
    sizes = sorted((min(size, capacity) for size in lengths * 2), reverse=True)
    rows: list[float] = []
    for size in sizes:
        found = next((i for i, used in enumerate(rows) if used + size <= capacity), None)
        if found is None:
            rows.append(size)
        else:
            rows[found] += size
    return sum(rows) / len(rows)


def of_mean(mean: float, limit: int, prompt: float = PROMPT, source: str = "") -> Lengths:
    """Make log-normal lengths, cut at the limit, with this mean after the cut."""
    if not 1 <= mean <= limit:
        raise UserError(
            f"--lengths {mean:g}: responses have 1 to {limit} tokens (max_new_tokens); give their mean"
        )
    normal = NormalDist(0, SPREAD)
    scores = [normal.inv_cdf((i + 0.5) / NUM_CLASSES) for i in range(NUM_CLASSES)]

    def cut(scale: float) -> tuple[float, ...]:
        return tuple(min(max(scale * exp(score), 1.0), limit) for score in scores)

    low, high = 1e-3, 1e3 * limit
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sum(cut(middle)) < mean * NUM_CLASSES else (low, middle)
    return Lengths(prompt, cut(high), limit, source or "as --lengths says")


def read_lengths(path: Path, limit: int, prompt: float = PROMPT) -> Lengths:
    """Read a run's lengths from samples.jsonl (each response) or metrics.jsonl (means of its steps)."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"--lengths {path}: {error}; give a number, metrics.jsonl or samples.jsonl"
        ) from error
    rows = [row for row in rows if isinstance(row, dict)]
    samples = (
        row.get(KEY_SAMPLE) for row in rows if "validation" not in row
    )  # a number in training, a list of them in an evaluation
    every = (one for found in samples for one in (found if isinstance(found, list) else [found]))
    if found := [float(number) for number in every if isinstance(number, int | float)]:
        _check(path, found, limit)
        return Lengths(prompt, _classes(found), limit, f"{len(found)} samples of {path}")
    if means := [float(row[KEY_MEAN]) for row in rows if isinstance(row.get(KEY_MEAN), int | float)]:
        _check(path, means, limit)
        return of_mean(sum(means) / len(means), limit, prompt, f"{len(means)} steps of {path}")
    raise UserError(
        f"--lengths {path}: no {KEY_SAMPLE} and no {KEY_MEAN} in it; give a run's own file or a mean"
    )


KEY_SAMPLE, KEY_MEAN = "num_tokens", "length/mean"
"""Keys of samples.jsonl and metrics.jsonl."""


def _check(path: Path, found: Sequence[float], limit: int) -> None:
    worst = max(found) if max(found) > limit else min(found)
    if not 0 < worst <= limit:
        raise UserError(
            f"--lengths {path}: a response of {worst:g} tokens, the recipe allows 1 to {limit}; raise "
            "policy.generation.max_new_tokens, or give another file"
        )


def _classes(found: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(found)
    if len(ordered) <= NUM_CLASSES:
        return tuple(ordered)
    return tuple(ordered[int((i + 0.5) / NUM_CLASSES * len(ordered))] for i in range(NUM_CLASSES))
