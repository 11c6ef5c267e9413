"""Table, bar chart and per-group lines that `nemo-grpo eval` shows of its results."""

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
TASK_METRICS = ("box_", "mask_")
"""Prefixes of a task's own metrics that the table shows."""


def show(evaluation: Evaluation, model: Path) -> None:
    """Print and plot the results; for several seeds, also write their mean."""
    from rich.console import Console

    out = evaluation.out
    summaries = evaluation.summaries
    if len(summaries) > 1:
        summary = over_seeds(summaries)
        (out / SEEDS).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        summary_file = SEEDS
        spread = SPREAD
        spread_name = f"standard deviation over {len(summaries)} seeds"
    else:
        summary = next(iter(summaries.values()))
        summary_file = SUMMARY
        spread = ERRORS
        spread_name = "standard error over problems"
    # The results of several seeds share the protocol, and their conditions differ only in the seed.
    result = next(iter(evaluation.results.values()))
    conditions = describe(result.conditions, list(summaries))
    plot(summary, out / PICTURE, f"{model.resolve().name}: {conditions}", spread)
    prompts = ", ".join(f"{name}: {entry['prompt']}" for name, entry in summary[BENCHMARKS].items())
    protocol = f"; protocol {result.protocol['name']}" if result.protocol else ""
    console = Console()
    console.print(f"{model}; per cent +- {spread_name}", highlight=False, soft_wrap=True)
    console.print(table(summary, spread))
    for line in groups(summary):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{conditions}; prompts {prompts}{protocol}", highlight=False)
    # soft_wrap keeps a path in one piece, so that it can be copied.
    console.print(f"{out / summary_file}, {out / PICTURE}", highlight=False, soft_wrap=True)


def table(summary: Mapping[str, Any], spread: str = ERRORS) -> Table:
    """Lay out a column per benchmark and one for their average, in per cent with errors.

    Args:
        summary: from `SuiteResult.write` or `over_seeds`.
        spread: key in the summary of the numbers after +-.
    """
    from rich.table import Table

    num_samples = _num_samples(summary)
    entries = summary[BENCHMARKS]
    rows = Table("")
    for name, entry in entries.items():
        rows.add_column(f"{name}\n{entry['num_problems']} problems", justify="right")
    columns = list(entries.values())
    if len(columns) > 1:
        columns.append(summary["average"])
        rows.add_column(f"average\n{len(entries)} sets", justify="right")
    # A column from an older version may have fewer metrics; only the common ones are shown.
    metrics = common([column["metrics"] for column in columns])
    for metric, label in labels(num_samples, metrics).items():
        cells = [_cell(metric, column["metrics"], column[spread]) for column in columns]
        rows.add_row(label, *cells)
        has_run_errors = all("accuracy_runs" in column[spread] for column in columns)
        if metric == "accuracy" and num_samples > 1 and has_run_errors:
            run_errors = [f"{100 * column[spread]['accuracy_runs']:.1f}" for column in columns]
            rows.add_row("  +- of runs", *run_errors)
    return rows


def groups(summary: Mapping[str, Any]) -> list[str]:
    """Write avg@k of each group of problems, one line per benchmark that has groups."""
    lines = []
    for name, entry in summary[BENCHMARKS].items():
        accuracies = [f"{label} {100 * group['accuracy']:.1f}" for label, group in entry["groups"].items()]
        if accuracies:
            lines.append(f"{name}, avg@{_num_samples(summary)}: {', '.join(accuracies)}")
    return lines


def _num_samples(summary: Mapping[str, Any]) -> int:
    return int(summary["conditions"]["num_samples"])


def labels(num_samples: int, measured: Sequence[str]) -> dict[str, str]:
    """Map the table's metrics to their labels."""
    table_labels = {"greedy": "greedy pass@1", "accuracy": f"avg@{num_samples}"}
    for name in measured:
        if name.startswith("pass@") and name != "pass@1":  # pass@1 equals avg@k
            table_labels[name] = name
    table_labels |= {
        f"maj@{num_samples}": f"maj@{num_samples}",
        "format": "format",
        "truncated": "truncated",
        TOKENS: "mean tokens",
    }
    for name in measured:
        if name.startswith(TASK_METRICS):
            table_labels[name] = name
    return table_labels


def _cell(metric: str, means: Mapping[str, float], errors: Mapping[str, float]) -> str:
    if metric == TOKENS:
        return f"{means[metric]:.0f}"
    error = f" +- {100 * errors[metric]:.1f}" if metric in errors else ""
    return f"{100 * means[metric]:.1f}{error}"


def plot(summary: Mapping[str, Any], path: Path, title: str, spread: str = ERRORS) -> None:
    """Plot avg@k, greedy, maj@k and pass@k as bars, as a PNG.

    Args:
        summary: as in `table`.
        path: path of the PNG.
        title: text above the bars.
        spread: as in `table`.
    """
    from nemo_grpo.support.pictures import COLORS, INK, new_figure, tidy, write_png

    num_samples = _num_samples(summary)
    entries = summary[BENCHMARKS]
    bars = {"accuracy": f"avg@{num_samples}", "greedy": "greedy"}
    if num_samples > 1:
        bars |= {name: name for name in (f"maj@{num_samples}", f"pass@{num_samples}")}
    width = GROUP_WIDTH / len(bars)
    figure = new_figure(max(4.4, 1.0 + 1.7 * len(entries)), 3.6)
    axes = figure.add_subplot()
    for number, (metric, label) in enumerate(bars.items()):
        # Benchmark i is at x = i. Its bars stand side by side, centred on i.
        offset = width * (number - (len(bars) - 1) / 2)
        places = [index + offset for index in range(len(entries))]
        heights = [100 * entry["metrics"][metric] for entry in entries.values()]
        errors = [100 * entry[spread].get(metric, 0.0) for entry in entries.values()]
        style: dict[str, Any] = {
            "color": COLORS[number],
            "error_kw": {"elinewidth": 1.1, "ecolor": INK},
            "capsize": 2,
        }
        container = axes.bar(places, heights, width=0.86 * width, yerr=errors, label=label, **style)
        axes.bar_label(container, fmt="%.1f", fontsize=7, color=INK, padding=2)
    names = [f"{name}\n{entry['num_problems']} problems" for name, entry in entries.items()]
    axes.set_xticks(range(len(entries)), names)
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.set_ylim(0, 108)  # room for the number above a bar of 100
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("per cent", fontsize=9, color=INK)
    wrapped = fill(title, int(14 * figure.get_figwidth()))
    figure.suptitle(wrapped, x=0.01, ha="left", fontsize=8.5, color=INK)
    figure.legend(loc="outside lower center", fontsize=8.5, ncols=4, frameon=False)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    write_png(figure, path, dpi=150)
