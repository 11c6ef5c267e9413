"""Results as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from nemo_grpo.evaluate.seeds import SEEDS, SPREAD, over_seeds
from nemo_grpo.evaluate.summary import BENCHMARKS, ERRORS, SUMMARY, common

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.evaluate.suite import SuiteResult

PICTURE = "scores.png"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
TOKENS = "num_tokens"
OWN = ("box_", "mask_")
"""How metrics of a task's own begin that the table shows."""


def show(result: SuiteResult, summaries: Mapping[int, dict[str, Any]], model: Path, out: Path) -> None:
    """Print the results and draw them; of several seeds also write their mean.

    Args: result: of one seed.  summaries: by seed, as `SuiteResult.write` returns them.
    """
    from rich.console import Console

    summary, written, spread = next(iter(summaries.values())), SUMMARY, ERRORS
    described, spread_name = result.conditions.describe([*summaries]), "standard error over problems"
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
    """A column per benchmark and one for their average; per cent with standard errors.

    Args: summary: what `SuiteResult.write` or `over_seeds` returns.  spread: its key of what follows +-.
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
    """A line per benchmark with grouped problems: avg@k of each group."""
    lines = []
    for name, entry in summary[BENCHMARKS].items():
        found = [f"{label} {100 * g['accuracy']:.1f}" for label, g in entry["groups"].items()]
        if found:
            lines.append(f"{name}, avg@{_num_samples(summary)}: {', '.join(found)}")
    return lines


def _num_samples(summary: Mapping[str, Any]) -> int:
    return int(summary["conditions"]["num_samples"])


def labels(num_samples: int, measured: Sequence[str]) -> dict[str, str]:
    """A table's metrics -> their labels."""
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
    """PNG: avg@k as bars, greedy, maj@k and pass@k as points; ``spread``: as in `table`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    k, entries = _num_samples(summary), summary[BENCHMARKS]
    names = list(entries)
    figure = Figure(figsize=(2.2 + 1.5 * len(names), 4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    metrics = [entry["metrics"] for entry in entries.values()]
    errors = [entry[spread] for entry in entries.values()]
    series = [("greedy", "greedy", "o", ORANGE, -0.12), (f"maj@{k}", f"maj@{k}", "D", GREEN, 0.12)]
    series += [(f"pass@{k}", f"pass@{k}", "_", GREY, 0.0)] if k > 1 else []
    places = range(len(names))
    axes.bar(
        places,
        [100 * m["accuracy"] for m in metrics],
        width=0.6,
        yerr=[100 * e["accuracy"] for e in errors],
        color=BLUE,
        alpha=0.75,
        capsize=4,
        label=f"avg@{k}",
    )
    for metric, label, marker, color, shift in series:
        axes.errorbar(
            [place + shift for place in places],
            [100 * m[metric] for m in metrics],
            yerr=[100 * e[metric] for e in errors],
            fmt=marker,
            color=color,
            markersize=11 if marker == "_" else 5,
            capsize=2,
            label=label,
        )
    axes.set_xticks(places, [f"{name}\n(N={entry['num_problems']})" for name, entry in entries.items()])
    axes.set_ylim(0, 100)
    axes.set_ylabel("per cent")
    axes.set_title(fill(title, 30 + 20 * len(names)), fontsize=8)
    figure.legend(loc="outside lower center", fontsize=8, ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
