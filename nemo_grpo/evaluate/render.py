"""Table and bar chart of an evaluation's results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from nemo_grpo.evaluate.config import describe
from nemo_grpo.evaluate.summary import BENCHMARKS, ERRORS, SEEDS, SPREAD, SUMMARY, common, over_seeds

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.evaluate.suite import Evaluation

PICTURE = "scores.png"
GROUP_WIDTH = 0.8
"""Width of a benchmark's bars together; the centres of two benchmarks are 1 apart."""
TOKENS = "num_tokens"
OWN = ("box_", "mask_")
"""Prefixes of a task's own metrics that the table shows."""


def show(evaluation: Evaluation, model: Path) -> None:
    """Print and plot the results; for several seeds, also write their mean."""
    from rich.console import Console

    result = next(iter(evaluation.results.values()))
    summaries, out = evaluation.summaries, evaluation.out
    summary, written, spread = next(iter(summaries.values())), SUMMARY, ERRORS
    described, spread_name = describe(result.conditions, [*summaries]), "standard error over problems"
    if len(summaries) > 1:
        summary, written, spread = over_seeds(summaries), SEEDS, SPREAD
        (out / SEEDS).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        spread_name = f"standard deviation over {len(summaries)} seeds"
    plot(summary, out / PICTURE, f"{model.resolve().name}: {described}", spread)
    prompts = ", ".join(f"{name}: {entry['prompt']}" for name, entry in summary[BENCHMARKS].items())
    console = Console()
    console.print(f"{model}; per cent +- {spread_name}", highlight=False, soft_wrap=True)
    console.print(table(summary, spread))
    for line in groups(summary):
        console.print(line, highlight=False, soft_wrap=True)
    followed = f"; protocol {result.protocol['name']}" if result.protocol else ""
    console.print(f"{described}; prompts {prompts}{followed}", highlight=False)
    console.print(f"{out / written}, {out / PICTURE}", highlight=False, soft_wrap=True)


def table(summary: Mapping[str, Any], spread: str = ERRORS) -> Table:
    """Lay out a column per benchmark and one for their average, in per cent with errors.

    Args: summary: from `SuiteResult.write` or `over_seeds`.  spread: its key of the numbers after +-.
    """
    from rich.table import Table

    k, entries = _num_samples(summary), summary[BENCHMARKS]
    shown = Table("")
    for name, entry in entries.items():
        shown.add_column(f"{name}\n{entry['num_problems']} problems", justify="right")
    columns = list(entries.values())
    if len(columns) > 1:
        columns.append(summary["average"])
        shown.add_column(f"average\n{len(entries)} sets", justify="right")
    for metric, label in labels(k, common([column["metrics"] for column in columns])).items():
        shown.add_row(label, *(_cell(metric, c["metrics"], c[spread]) for c in columns))
        if metric == "accuracy" and k > 1 and all("accuracy_runs" in column[spread] for column in columns):
            runs = [100 * column[spread]["accuracy_runs"] for column in columns]
            shown.add_row("  +- of runs", *(f"{error:.1f}" for error in runs))
    return shown


def groups(summary: Mapping[str, Any]) -> list[str]:
    """Write a line per benchmark with grouped problems: avg@k of each group."""
    lines = []
    for name, entry in summary[BENCHMARKS].items():
        found = [f"{label} {100 * g['accuracy']:.1f}" for label, g in entry["groups"].items()]
        if found:
            lines.append(f"{name}, avg@{_num_samples(summary)}: {', '.join(found)}")
    return lines


def _num_samples(summary: Mapping[str, Any]) -> int:
    return int(summary["conditions"]["num_samples"])


def labels(num_samples: int, measured: Sequence[str]) -> dict[str, str]:
    """Map the table's metrics to their labels."""
    passes = {name: name for name in measured if name.startswith("pass@") and name != "pass@1"}
    return {
        "greedy": "greedy pass@1",
        "accuracy": f"avg@{num_samples}",
        **passes,
        f"maj@{num_samples}": f"maj@{num_samples}",
        "format": "format",
        "truncated": "truncated",
        TOKENS: "mean tokens",
        **{name: name for name in measured if name.startswith(OWN)},
    }


def _cell(metric: str, means: Mapping[str, float], errors: Mapping[str, float]) -> str:
    if metric == TOKENS:
        return f"{means[metric]:.0f}"
    error = f" +- {100 * errors[metric]:.1f}" if metric in errors else ""
    return f"{100 * means[metric]:.1f}{error}"


def plot(summary: Mapping[str, Any], path: Path, title: str, spread: str = ERRORS) -> None:
    """Plot avg@k, greedy, maj@k and pass@k as bars, as a PNG.  Args: spread: as in `table`."""
    from nemo_grpo.support.pictures import COLORS, INK, new_figure, tidy, write_png

    k, entries = _num_samples(summary), summary[BENCHMARKS]
    bars = {"accuracy": f"avg@{k}", "greedy": "greedy"}
    bars |= {name: name for name in (f"maj@{k}", f"pass@{k}") if k > 1}
    width = GROUP_WIDTH / len(bars)
    figure = new_figure(max(4.4, 1.0 + 1.7 * len(entries)), 3.6)
    axes = figure.add_subplot()
    for number, (metric, label) in enumerate(bars.items()):
        places = [place + width * (number - (len(bars) - 1) / 2) for place in range(len(entries))]
        heights = [100 * entry["metrics"][metric] for entry in entries.values()]
        errors = [100 * entry[spread].get(metric, 0.0) for entry in entries.values()]
        style: dict[str, Any] = {
            "color": COLORS[number],
            "error_kw": {"elinewidth": 1.1, "ecolor": INK},
            "capsize": 2,
        }
        drawn = axes.bar(places, heights, width=0.86 * width, yerr=errors, label=label, **style)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7, color=INK, padding=2)
    names = [f"{name}\n{entry['num_problems']} problems" for name, entry in entries.items()]
    axes.set_xticks(range(len(entries)), names)
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("per cent", fontsize=9, color=INK)
    wrapped = fill(title, int(14 * figure.get_figwidth()))
    figure.suptitle(wrapped, x=0.01, ha="left", fontsize=8.5, color=INK)
    figure.legend(loc="outside lower center", fontsize=8.5, ncols=4, frameon=False)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    write_png(figure, path, dpi=150)
