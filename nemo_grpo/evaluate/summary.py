"""The file summary.json: read, checked against new results, joined with them, averaged over seeds."""

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
    """Read the summary in a folder of results; return None if it is missing, {} if it is damaged."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    try:
        return _Summary.model_validate_json(path.read_bytes()).model_dump()
    except (OSError, ValueError):
        return {}


def check_summary(folder: Path, conditions: Mapping[str, Any], benchmarks: Sequence[Benchmark]) -> None:
    """Refuse to replace results by different ones; more problems of the same benchmark are allowed."""
    path = folder / SUMMARY
    previous = read_summary(folder)
    if previous is None:
        return
    if not previous:
        raise UserError(f"{path} is damaged, or of an older version; remove it (responses stay), {_REMEDY}")
    changed_conditions = differences(previous["conditions"], conditions)
    if changed_conditions:
        raise UserError(
            f"{path} holds results of other conditions ({', '.join(changed_conditions)}); {_REMEDY}"
        )
    for benchmark in benchmarks:
        if benchmark.name in previous[BENCHMARKS]:
            _check_entry(path, previous[BENCHMARKS][benchmark.name], benchmark)


def _check_entry(path: Path, entry: Mapping[str, Any], benchmark: Benchmark) -> None:
    """Refuse to replace the results of a benchmark by those of fewer problems, or of another benchmark."""
    num_previous = entry["num_problems"]
    num_now = len(benchmark.problems)
    if num_now < num_previous:
        raise UserError(
            f"{path} holds results of {num_previous} problems of {benchmark.name}, and --num-problems "
            f"{num_now} would lose some of them; use at least {num_previous}, {_REMEDY}"
        )
    identity = benchmark.identity(num_previous)
    changed = [key for key, value in identity.items() if entry.get(key) != value]
    if changed:
        raise UserError(
            f"{path} holds results of {benchmark.name} with another {' and '.join(changed)}; {_REMEDY}"
        )


_REMEDY = "choose another --out, or --overwrite"


def differences(before: object, now: Mapping[str, Any]) -> list[str]:
    """List the names of the conditions that differ between a file and this evaluation."""
    old = before if isinstance(before, dict) else {}
    # Through JSON, because the tuples of ``now`` are lists in a file.
    new = json.loads(json.dumps(now))
    return sorted(key for key in {*old, *new} if old.get(key) != new.get(key))


def joined(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Join new results with earlier ones under the same conditions, and average over all benchmarks.

    New results replace earlier ones of the same benchmark.
    """
    entries: dict[str, Any] = {}
    if before and not differences(before.get("conditions"), now["conditions"]):
        entries |= before.get(BENCHMARKS, {})
    entries |= now[BENCHMARKS]
    return {**now, BENCHMARKS: entries, "average": average(entries.values())}


def average(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the metrics over benchmarks, with standard errors sqrt(sum_b se_b^2) / B."""
    entries = list(entries)
    means = _means([entry["metrics"] for entry in entries])
    # Standard errors must not be averaged like metrics; they are combined below.
    metrics = {name: mean for name, mean in means.items() if not name.endswith("_stderr")}
    errors = [entry[ERRORS] for entry in entries]
    average_errors = {}
    for name in common(errors):
        variance = math.fsum(error[name] ** 2 for error in errors)
        average_errors[name] = math.sqrt(variance) / len(entries)
    return {"metrics": metrics, ERRORS: average_errors}


def common(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the names that all mappings have. A file of an older version may have fewer."""
    return [name for name in values[0] if all(name in mapping for mapping in values)]


def over_seeds(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Average the summaries of several seeds, with the standard deviation over the seeds.

    Args:
        summaries: seed -> summary, for at least two seeds under the same conditions.

    Returns:
        A summary. ``standard_deviations`` are over the seeds. ``standard_errors`` are the errors over
        problems, averaged over the seeds. ``by_seed`` has each seed's metrics.
    """
    first, *_ = summaries.values()
    # A folder may also hold earlier benchmarks that only some of the seeds have.
    names = common([summary[BENCHMARKS] for summary in summaries.values()])
    benchmarks = {}
    for name in names:
        entries = {seed: summary[BENCHMARKS][name] for seed, summary in summaries.items()}
        benchmarks[name] = _over_entries(entries)
    averages = {}
    for seed, summary in summaries.items():
        averages[seed] = average(summary[BENCHMARKS][name] for name in names)
    return {
        "model": first["model"],
        "conditions": {key: value for key, value in first["conditions"].items() if key != "seed"},
        "seeds": list(summaries),
        BENCHMARKS: benchmarks,
        "average": _over_entries(averages),
    }


def _over_entries(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Average one benchmark's entries over the seeds."""
    first, *_ = entries.values()
    metrics = [entry["metrics"] for entry in entries.values()]
    equal_for_all_seeds = ("num_problems", "sha256", "prompt", "protocol")
    groups = {}
    for label in first.get("groups", {}):
        groups[label] = _means([entry["groups"][label] for entry in entries.values()])
    return {
        **{key: first[key] for key in equal_for_all_seeds if key in first},
        "metrics": _means(metrics),
        SPREAD: {name: stdev(values[name] for values in metrics) for name in common(metrics)},
        ERRORS: _means([entry[ERRORS] for entry in entries.values()]),
        "by_seed": {str(seed): entry["metrics"] for seed, entry in entries.items()},
        "groups": groups,
    }


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(mapping[name] for mapping in values) for name in common(values)}
