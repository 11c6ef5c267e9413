"""What summary.json of an evaluation holds from before, and what becomes of it with new results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError

SUMMARY = "summary.json"
BENCHMARKS = "benchmarks"
"""The key that only a summary of benchmarks has; a recipe's has its metrics at the top."""


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary in a folder of results; None: there is none; {}: it is damaged."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if _is_sound(found) else {}


def _is_sound(found: Any) -> bool:
    """Whether it has what every version has written."""
    if not isinstance(found, dict) or not isinstance(found.get("conditions"), dict):
        return False
    entries = found.get(BENCHMARKS, {"": found})  # a recipe's summary is like a benchmark's entry
    return isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("num_problems"), int)
        and isinstance(entry.get("metrics"), dict)
        and isinstance(entry.get("standard_errors"), dict)
        for entry in entries.values()
    )


def check_summary(folder: Path, conditions: Mapping[str, Any], *, of_benchmarks: bool) -> None:
    """Raises UserError if the folder has results of another kind, or under other conditions, or damaged."""
    before = read_summary(folder)
    if before is None:
        return
    if not before:
        raise UserError(f"{folder / SUMMARY} is damaged; remove it (responses stay), {_REMEDY}")
    if (BENCHMARKS in before) != of_benchmarks:
        kind = "benchmarks" if BENCHMARKS in before else "a recipe's own problems"
        raise UserError(f"{folder / SUMMARY} holds results of {kind}; {_REMEDY}")
    changed = differences(before.get("conditions"), conditions)
    if changed:
        raise UserError(
            f"{folder / SUMMARY} holds results of other conditions ({', '.join(changed)}); {_REMEDY}"
        )


def check_entries(folder: Path, asked: Mapping[str, tuple[int, Mapping[str, Any]]]) -> None:
    """Raises UserError if the folder has results of a benchmark under that name, but asked otherwise.

    Args: asked: by name, the number of problems, and what must not change.
    """
    entries = (read_summary(folder) or {}).get(BENCHMARKS, {})
    for name in [name for name in asked if name in entries]:
        num_problems, now = asked[name]
        changed = [key for key, value in now.items() if entries[name].get(key) != value]
        if changed:
            raise UserError(
                f"{folder / SUMMARY} holds results of {name} with another {' and '.join(changed)}; {_REMEDY}"
            )
        check_number(folder, entries[name]["num_problems"], num_problems, f" of {name}")


def check_number(folder: Path, before: int, now: int, where: str = "") -> None:
    """Raises UserError if results of some problems would be lost; more problems are welcome."""
    if now < before:
        raise UserError(
            f"{folder / SUMMARY} holds results of {before} problems{where}, and --num-problems {now} would "
            f"lose some of them; ask for at least {before}, {_REMEDY}"
        )


_REMEDY = "choose another --out, or --overwrite"


def differences(before: object, now: Mapping[str, Any]) -> list[str]:
    """Names of the conditions that differ, as JSON values."""
    old = before if isinstance(before, dict) else {}
    new = json.loads(json.dumps(now))
    return sorted(key for key in {*old, *new} if old.get(key) != new.get(key))


def joined(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of benchmarks with what was there under the same conditions, and the average over all.

    Of a benchmark that both have, the new results stay.
    """
    kept = {}
    if before and not differences(before.get("conditions"), now["conditions"]):
        kept = before.get(BENCHMARKS, {})
    entries = {**kept, **now[BENCHMARKS]}
    means, errors = average(entries.values())
    return {**now, BENCHMARKS: entries, "average": {"metrics": means, "standard_errors": errors}}


def average(entries: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Means of the metrics over benchmarks, and their standard errors sqrt(sum_b se_b^2) / B."""
    chosen = list(entries)
    metrics = [entry["metrics"] for entry in chosen]
    errors = [entry["standard_errors"] for entry in chosen]
    num = len(chosen)
    means = {
        name: math.fsum(m[name] for m in metrics) / num
        for name in _common(metrics)
        if not name.endswith("_stderr")
    }
    roots = {name: math.sqrt(math.fsum(e[name] ** 2 for e in errors)) / num for name in _common(errors)}
    return means, roots


def _common(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Names that all have: an older version may have written fewer."""
    return [name for name in values[0] if all(name in other for other in values)]
