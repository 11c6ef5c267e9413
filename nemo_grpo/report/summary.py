"""Table of a report: a row per setting, each figure as mean +- sample standard deviation over seeds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_grpo.report.runs import (
    ACCURACY,
    ENTROPY,
    SET_ACCURACY,
    Measure,
    RunGroup,
    RunLog,
    common_key,
    matching,
    measure_of,
    pass_key,
)
from nemo_grpo.report.stuck import findings


@dataclass(frozen=True)
class Column:
    """One figure of the table.

    Attributes: name: head of the column.  values: one number per run that has it.  digits: decimals.
                sign: ``+`` shows the sign of positive numbers too.
    """

    name: str
    values: Callable[[RunGroup], list[float]]
    digits: int = 3
    sign: str = ""

    def cell(self, group: RunGroup) -> str:
        """Write ``0.600 +- 0.141``, mean and sample standard deviation; one number alone; ``-`` for none."""
        values = self.values(group)
        if not values:
            return "-"
        mean = f"{statistics.mean(values):{self.sign}.{self.digits}f}"
        return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{self.digits}f}"


def columns(groups: Sequence[RunGroup]) -> list[Column]:
    """List the columns of the table, without those that no group can fill."""
    measure = measure_of(groups)
    key = measure.key
    passes, entropy = pass_key(groups), common_key(groups, ENTROPY)
    entropy_name = "entropy" if entropy == ENTROPY[0] else "sampled entropy"
    found = [
        Column("start", lambda g: [points[0] for run in g.runs if 0 in (points := run.points(key))]),
        Column("best", lambda g: [measure.best(values) for values in g.values(key)]),
        Column("final", lambda g: g.each(key, "last")),
        Column("gain", lambda g: g.gains(key), sign="+"),
        Column("least gain", lambda g: _least_gain(g, measure), sign="+"),
        *([] if key == ACCURACY else [_last("accuracy", ACCURACY)]),
        Column("greedy", lambda g: g.each("validation/greedy", "last")),
        Column(passes.rpartition("/")[2], lambda g: g.each(passes, "last")),
        *(_last(match[1], match[0]) for match in matching(groups, SET_ACCURACY)),
        Column("tokens", lambda g: g.each("validation/num_tokens", "last"), digits=1),
        Column(f"{entropy_name}, first", lambda g: g.each(entropy, "first")),
        Column(f"{entropy_name}, last", lambda g: g.each(entropy, "last")),
        Column(
            "prompts", lambda g: [n for run in g.runs if (n := _sum(run, "rollout/num_prompts"))], digits=0
        ),
        Column("minutes", lambda g: [s / 60 for run in g.runs if (s := seconds(run))], digits=1),
    ]
    return [column for column in found if any(column.values(group) for group in groups)]


def _least_gain(group: RunGroup, measure: Measure) -> list[float]:
    gains = group.gains(measure.key)
    return [measure.worst(gains)] if len(gains) > 1 else []


def _last(name: str, key: str) -> Column:
    return Column(name, lambda group: group.each(key, "last"))


def note(groups: Sequence[RunGroup]) -> str:
    """Explain the columns and deviations that the table has."""
    shown = {column.name for column in columns(groups)}
    measure = measure_of(groups)
    notes = {
        "final": "Accuracies on held-out problems.",
        "best": "best is the largest validation of each run, which flatters noisy runs.",
        "least gain": "least gain is the smallest of the seeds.",
    }
    if measure.key != ACCURACY:
        better = "" if measure.higher_is_better else ", where lower is better"
        notes["final"] = f"start, best, final and gain are of {measure.key}, as the recipe ranks{better}."
    if not measure.higher_is_better:
        notes["best"] = "best is the smallest validation of each run, which flatters noisy runs."
        notes["least gain"] = "least gain is the largest of the seeds, the least improvement."
    sentences = [sentence for name, sentence in notes.items() if name in shown]
    if any(len(group.runs) > 1 for group in groups):
        sentences.append("+- is the sample standard deviation over seeds.")
    return " ".join(sentences)


def table(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Make head and rows as texts, with +- between mean and deviation."""
    shown = columns(groups)
    rows = [
        [
            group.label,
            ", ".join(run.seed for run in group.runs),
            _steps(group),
            *(c.cell(group) for c in shown),
        ]
        for group in groups
    ]
    return ["setting", "seed numbers", "steps", *(column.name for column in shown)], rows


def markdown(groups: Sequence[RunGroup]) -> str:
    """Write the table in Markdown."""
    return markdown_table(*table(groups))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table of texts."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def records(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Convert the table to JSON's types: values of every run, mean and standard deviation, folders."""
    shown = columns(groups)
    return [
        {
            "setting": group.label,
            "seeds": [run.seed for run in group.runs],
            "runs": [str(run.path) for run in group.runs],
            "steps": [max(run.rows) for run in group.runs],
            **{column.name: _record(column.values(group)) for column in shown},
        }
        for group in groups
    ]


def _record(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.mean(values), "std": deviation}


def stuck_runs(groups: Sequence[RunGroup]) -> list[str]:
    """List reasons why runs do not learn at their end: ``run: finding``."""
    return [
        f"{run.path.name}: {sentence}"
        for group in groups
        for run in group.runs
        for sentence in findings(
            [row for step, row in run.rows.items() if step > 0], weights=reward_weights(run)
        )
    ]


def reward_weights(run: RunLog) -> dict[str, float] | None:
    """Return the weights of a run's rewards; None without a task, whose components they are."""
    prefix = "nemo_grpo.rewards."
    weights = {
        key.removeprefix(prefix): float(value)
        for key, value in run.settings.items()
        if key.startswith(prefix)
    }
    return weights if weights and "nemo_grpo.task.name" in run.settings else None


def seconds(run: RunLog) -> float:
    """Add up the time that a run spent in steps and validations."""
    return _sum(run, "time/step") + _sum(run, "time/validation")


def _sum(run: RunLog, key: str) -> float:
    return sum(run.points(key).values())


def _steps(group: RunGroup) -> str:
    steps = sorted({max(run.rows) for run in group.runs})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
