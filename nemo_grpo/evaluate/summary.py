"""Summary of an evaluation, summary.json: joined with earlier results, averaged over seeds."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import BaseModel, ConfigDict

from nemo_grpo.evaluate.benchmarks import Benchmark
from nemo_grpo.support.errors import UserError

SUMMARY = "summary.json"
BENCHMARKS = "benchmarks"
ERRORS = "standard_errors"
SEEDS = "seeds.json"
SPREAD = "standard_deviations"
"""Key of the standard deviations over seeds, with ddof 1."""


class _Entry(BaseModel):
    """The fields of a benchmark's results that every version writes."""

    model_config = ConfigDict(extra="allow", strict=True)

    num_problems: int
    metrics: dict[str, float]
    standard_errors: dict[str, float]


class _Summary(BaseModel):
    """The fields of a summary that every version writes."""

    model_config = ConfigDict(extra="allow", strict=True)

    conditions: dict[str, Any]
    benchmarks: dict[str, _Entry]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read the summary in a folder of results; None: missing; {}: damaged."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    try:
        return _Summary.model_validate_json(path.read_bytes()).model_dump()
    except (OSError, ValueError):
        return {}


def check_summary(folder: Path, conditions: Mapping[str, Any], benchmarks: Sequence[Benchmark]) -> None:
    """Refuse to replace results by different ones; more problems of the same benchmark are allowed."""
    path, before = folder / SUMMARY, read_summary(folder)
    if before is None:
        return
    if not before:
        raise UserError(f"{path} is damaged, or of an older version; remove it (responses stay), {_REMEDY}")
    if changed := differences(before["conditions"], conditions):
        raise UserError(f"{path} holds results of other conditions ({', '.join(changed)}); {_REMEDY}")
    entries = before[BENCHMARKS]
    for benchmark in [benchmark for benchmark in benchmarks if benchmark.name in entries]:
        name, entry, now = benchmark.name, entries[benchmark.name], len(benchmark.problems)
        num_before = entry["num_problems"]
        identity = benchmark.identity(num_before)
        if now < num_before:
            raise UserError(
                f"{path} holds results of {num_before} problems of {name}, and --num-problems {now} would "
                f"lose some of them; use at least {num_before}, {_REMEDY}"
            )
        if changed := [key for key, value in identity.items() if entry.get(key) != value]:
            raise UserError(f"{path} holds results of {name} with another {' and '.join(changed)}; {_REMEDY}")


_REMEDY = "choose another --out, or --overwrite"


def differences(before: object, now: Mapping[str, Any]) -> list[str]:
    """Name the conditions that differ as JSON values."""
    old = before if isinstance(before, dict) else {}
    new = json.loads(json.dumps(now))
    return sorted(key for key in {*old, *new} if old.get(key) != new.get(key))


def joined(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Join new results with earlier ones under the same conditions, and average over all benchmarks.

    New results replace earlier ones of the same benchmark.
    """
    kept = {}
    if before and not differences(before.get("conditions"), now["conditions"]):
        kept = before.get(BENCHMARKS, {})
    entries = {**kept, **now[BENCHMARKS]}
    return {**now, BENCHMARKS: entries, "average": average(entries.values())}


def average(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the metrics over benchmarks, with standard errors sqrt(sum_b se_b^2) / B."""
    chosen = list(entries)
    errors = [entry[ERRORS] for entry in chosen]
    means = _means([entry["metrics"] for entry in chosen])
    roots = {n: math.sqrt(math.fsum(e[n] ** 2 for e in errors)) / len(chosen) for n in common(errors)}
    return {"metrics": {n: mean for n, mean in means.items() if not n.endswith("_stderr")}, ERRORS: roots}


def common(values: Sequence[Mapping[str, float]]) -> list[str]:
    """List names common to all: an older version may have written fewer."""
    return [name for name in values[0] if all(name in other for other in values)]


def over_seeds(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Average the summaries of several seeds, with the standard deviation over the seeds.

    Args:    summaries: by seed, at least two, of the same conditions and benchmarks.
    Returns: a summary; ``standard_deviations`` are over the seeds, ``standard_errors`` are the seeds' mean
             error over problems; ``by_seed`` has each seed's metrics.
    """
    first, *_ = summaries.values()
    names = [name for name in first[BENCHMARKS] if all(name in s[BENCHMARKS] for s in summaries.values())]
    return {
        "model": first["model"],
        "conditions": {key: value for key, value in first["conditions"].items() if key != "seed"},
        "seeds": list(summaries),
        BENCHMARKS: {
            name: _over({seed: summary[BENCHMARKS][name] for seed, summary in summaries.items()})
            for name in names
        },
        "average": _over(
            {
                seed: average(summary[BENCHMARKS][name] for name in names)
                for seed, summary in summaries.items()
            }
        ),
    }


def _over(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    first, *_ = entries.values()
    metrics = [entry["metrics"] for entry in entries.values()]
    kept = ("num_problems", "sha256", "prompt", "protocol")
    return {
        **{key: first[key] for key in kept if key in first},
        "metrics": _means(metrics),
        SPREAD: {name: stdev(m[name] for m in metrics) for name in common(metrics)},
        ERRORS: _means([entry[ERRORS] for entry in entries.values()]),
        "by_seed": {str(seed): entry["metrics"] for seed, entry in entries.items()},
        "groups": {
            label: _means([entry["groups"][label] for entry in entries.values()])
            for label in first.get("groups", {})
        },
    }


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in values) for name in common(values)}
