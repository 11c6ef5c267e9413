"""Results of a perturbation study: accuracies per kind of position, and tests of their differences."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_grpo.evaluate.passk import mean_and_stderr
from nemo_grpo.tasks import Problem

KINDS = ("pivot", "random", "calm")
Perturbation = Literal["separately", "together", "truncate"]
NUM_FLIPS = 10_000
"""Draws of the permutation test; its smallest p is 1 / (NUM_FLIPS + 1)."""


@dataclass(frozen=True)
class PivotSettings:
    """Settings of the study.

    Attributes:
        num_problems: number of solved problems to study.
        share: share of a response's tokens, for each kind of position.
        max_positions: maximum positions of a kind per response; None: no maximum.
        num_continuations: continuations of each perturbed response, and of each control.
        perturbation: separately replaces one token and resamples the rest; together replaces all tokens of a
            kind and resamples after the last one; truncate cuts the response before a token and resamples.
        replacement: uniform draws any other token of the vocabulary; policy draws from the policy's own
            distribution without the token.
        seed: seed of positions, replacements and continuations.
    """

    num_problems: int = 50
    share: float = 0.05
    max_positions: int | None = 4
    num_continuations: int = 4
    replacement: Literal["uniform", "policy"] = "uniform"
    seed: int = 0
    perturbation: Perturbation = "separately"

    def num_positions(self, num_candidates: int) -> int:
        """Count positions of each kind in a response, at least one."""
        most = num_candidates if self.max_positions is None else self.max_positions
        return min(num_candidates, most, max(1, round(self.share * num_candidates)))


@dataclass(frozen=True)
class Solved:
    """A problem with its correct greedy response.

    Attributes:
        problem: the problem.
        prompt: tokens of the prompt.
        response: tokens of the response.
        entropies: [T], entropy at each token of the response, nats.
    """

    problem: Problem
    prompt: list[int]
    response: list[int]
    entropies: Tensor


@dataclass(frozen=True)
class Point:
    """One perturbation of one response, and the accuracies with and without it.

    Attributes:
        problem: id of the problem.
        kind: pivot, random or calm.
        position: last changed position; the response after it is resampled.
        entropy: mean entropy of the changed tokens, nats.
        token: text of the changed tokens.
        replacement: text in their place; "" for a cut.
        kept: accuracy with the original tokens.
        replaced: accuracy with the change.
        positions: positions of the changed tokens.
    """

    problem: str
    kind: str
    position: int
    entropy: float
    token: str
    replacement: str
    kept: float
    replaced: float
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class PivotStudy:
    """Outcome of a study.

    Attributes:
        settings: the study's settings.
        num_tried: problems that were answered to find the solved ones.
        solved: the solved problems.
        points: the perturbations.
    """

    settings: PivotSettings
    num_tried: int
    solved: list[Solved]
    points: list[Point]

    def summary(self) -> dict[str, dict[str, float]]:
        """Average over responses, per kind: entropy, accuracies and drop with standard errors."""
        summary = {}
        for kind in KINDS:
            mean_entropy, _ = mean_and_stderr(self._by_response(kind, "entropy"))
            row = {"entropy": mean_entropy}
            for quantity in ("kept", "replaced", "drop"):
                mean, stderr = mean_and_stderr(self._by_response(kind, quantity))
                row[quantity] = mean
                row[f"{quantity}_stderr"] = stderr
            summary[kind] = row
        return summary

    def contrasts(self) -> dict[str, dict[str, float]]:
        """Compare the drop at pivots with that at the other kinds, paired by response."""
        pivot_drops = self._by_response("pivot", "drop")
        contrasts = {}
        for kind in KINDS[1:]:
            pairs = zip(pivot_drops, self._by_response(kind, "drop"), strict=True)
            differences = [pivot_drop - drop for pivot_drop, drop in pairs]
            mean, stderr = mean_and_stderr(differences)
            p = sign_flip_p(differences, self.settings.seed)
            contrasts[f"pivot - {kind}"] = {"difference": mean, "stderr": stderr, "p": p}
        return contrasts

    def _by_response(self, kind: str, quantity: str) -> list[float]:
        """Average a quantity over the points of each response, which are not independent."""
        values_by_problem: dict[str, list[float]] = defaultdict(list)
        for point in self.points:
            if point.kind == kind:
                value = point.kept - point.replaced if quantity == "drop" else getattr(point, quantity)
                values_by_problem[point.problem].append(value)
        return [sum(values) / len(values) for values in values_by_problem.values()]

    def to_dict(self, decode: Callable[[int], str]) -> dict[str, Any]:
        """Convert everything to JSON values."""
        return {
            "settings": asdict(self.settings),
            "num_tried": self.num_tried,
            "num_solved": len(self.solved),
            "summary": self.summary(),
            "contrasts": self.contrasts(),
            "points": [asdict(point) for point in self.points],
            "responses": [
                {
                    "problem": solved.problem.id,
                    "tokens": [decode(token) for token in solved.response],
                    "entropies": [round(value, 4) for value in solved.entropies.tolist()],
                }
                for solved in self.solved
            ],
        }


def sign_flip_p(differences: Sequence[float], seed: int) -> float:
    """Compute the two-sided p of a mean of 0 under random signs of the paired differences."""
    values = torch.tensor(differences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (NUM_FLIPS, len(values)), generator=generator) * 2 - 1
    means = (signs * values).mean(1).abs()
    # The tolerance counts draws that equal the observed mean but for rounding.
    num_as_extreme = (means >= values.mean().abs() - 1e-12).sum()
    # The observed signs are one more draw, so that p is never 0.
    return float((num_as_extreme + 1) / (NUM_FLIPS + 1))
