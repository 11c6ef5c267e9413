"""One evaluation under several seeds: means, and their spread."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_grpo.evaluate.passk import mean_and_stderr
from nemo_grpo.evaluate.summary import BENCHMARKS, ERRORS, average, common

SEEDS = "seeds.json"
SPREAD = "standard_deviations"
"""Over seeds, with ddof 1."""


def seed_folder(out: Path, seed: int) -> Path:
    """The folder of one seed's results."""
    return out / f"seed-{seed}"


def over_seeds(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of the summaries of several seeds, with the standard deviation over the seeds.

    Args:    summaries: by seed, at least two, of the same conditions and benchmarks; see `SuiteResult.write`.
    Returns: a summary; ``standard_deviations`` are over the seeds, ``standard_errors`` over problems, the
             mean of the seeds'; ``by_seed`` has each seed's metrics.
    """
    first, *_ = summaries.values()
    names = [name for name in first[BENCHMARKS] if all(name in s[BENCHMARKS] for s in summaries.values())]
    return {
        "model": first["model"],
        "conditions": {key: value for key, value in first["conditions"].items() if key != "seed"},
        "seeds": list(summaries),
        BENCHMARKS: {
            name: _joined({seed: summary[BENCHMARKS][name] for seed, summary in summaries.items()})
            for name in names
        },
        "average": _joined({seed: _average(summary, names) for seed, summary in summaries.items()}),
    }


def _average(summary: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    means, errors = average(summary[BENCHMARKS][name] for name in names)
    return {"metrics": means, ERRORS: errors}


def _joined(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    first, *_ = entries.values()
    metrics = [entry["metrics"] for entry in entries.values()]
    kept = ("num_problems", "sha256", "prompt", "protocol")
    return {
        **{key: first[key] for key in kept if key in first},
        "metrics": _means(metrics),
        SPREAD: {name: _deviation([m[name] for m in metrics]) for name in common(metrics)},
        ERRORS: _means([entry[ERRORS] for entry in entries.values()]),
        "by_seed": {str(seed): entry["metrics"] for seed, entry in entries.items()},
        "groups": {
            label: _means([entry["groups"][label] for entry in entries.values()])
            for label in first.get("groups", {})
        },
    }


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(one[name] for one in values) / len(values) for name in common(values)}


def _deviation(values: Sequence[float]) -> float:
    return mean_and_stderr(values)[1] * math.sqrt(len(values))
