"""Table of a report: one row per setting, figures as mean +- sample standard deviation over seeds."""

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

    Attributes:
        name: head of the column.
        values: function that returns the figure of each run that has it.
        digits: number of decimals.
        sign: ``+`` shows the sign of positive numbers too.
    """

    name: str
    values: Callable[[RunGroup], list[float]]
    digits: int = 3
    sign: str = ""

    def cell(self, group: RunGroup) -> str:
        """Write mean and sample standard deviation as ``0.600 +- 0.141``.

        A single value has no deviation. Without values the cell is ``-``.
        """
        values = self.values(group)
        if not values:
            return "-"
        mean = f"{statistics.mean(values):{self.sign}.{self.digits}f}"
        return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{self.digits}f}"


def columns(groups: Sequence[RunGroup]) -> list[Column]:
    """List the columns of the table that at least one group can fill."""
    measure = measure_of(groups)
    key = measure.key
    passes = pass_key(groups)
    entropy = common_key(groups, ENTROPY)
    entropy_name = "entropy" if entropy == ENTROPY[0] else "sampled entropy"
    candidates = [
        Column("start", lambda group: _at_step_0(group, key)),
        Column("best", lambda group: [measure.best(values) for values in group.values(key)]),
        _last("final", key),
        Column("gain", lambda group: group.gains(key), sign="+"),
        Column("least gain", lambda group: _least_gain(group, measure), sign="+"),
    ]
    # Readers expect the accuracy, also if another metric ranks checkpoints.
    if key != ACCURACY:
        candidates.append(_last("accuracy", ACCURACY))
    candidates += [_last("greedy", "validation/greedy"), _last(passes.rpartition("/")[2], passes)]
    candidates += [_last(match[1], match[0]) for match in matching(groups, SET_ACCURACY)]
    candidates += [
        _last("tokens", "validation/num_tokens", digits=1),
        Column(f"{entropy_name}, first", lambda group: group.each(entropy, "first")),
        _last(f"{entropy_name}, last", entropy),
        Column("prompts", _num_prompts, digits=0),
        Column("minutes", _minutes, digits=1),
    ]
    return [column for column in candidates if any(column.values(group) for group in groups)]


def _at_step_0(group: RunGroup, key: str) -> list[float]:
    """Return the metric of each run that was validated before its first update."""
    curves = [run.points(key) for run in group.runs]
    return [points[0] for points in curves if 0 in points]


def _least_gain(group: RunGroup, measure: Measure) -> list[float]:
    gains = group.gains(measure.key)
    # A single run's least gain is its gain, which already has a column.
    return [measure.worst(gains)] if len(gains) > 1 else []


def _num_prompts(group: RunGroup) -> list[float]:
    sums = [_sum(run, "rollout/num_prompts") for run in group.runs]
    return [num_prompts for num_prompts in sums if num_prompts]


def _minutes(group: RunGroup) -> list[float]:
    times = [seconds(run) / 60 for run in group.runs]
    return [minutes for minutes in times if minutes]


def _last(name: str, key: str, digits: int = 3) -> Column:
    return Column(name, lambda group: group.each(key, "last"), digits)


def note(groups: Sequence[RunGroup]) -> str:
    """Write the note below the table, which explains its columns and deviations."""
    names = {column.name for column in columns(groups)}
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
    sentences = [sentence for name, sentence in notes.items() if name in names]
    if any(len(group.runs) > 1 for group in groups):
        sentences.append("+- is the sample standard deviation over seeds.")
    return " ".join(sentences)


def table(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table as texts."""
    figures = columns(groups)
    rows = []
    for group in groups:
        seeds = ", ".join(run.seed for run in group.runs)
        cells = [column.cell(group) for column in figures]
        rows.append([group.label, seeds, _steps(group), *cells])
    names = [column.name for column in figures]
    return ["setting", "seed numbers", "steps", *names], rows


def markdown(groups: Sequence[RunGroup]) -> str:
    """Write the table in Markdown."""
    return markdown_table(*table(groups))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table of texts."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def records(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Convert the table to JSON's types: every run's values, their mean and deviation, and the folders."""
    figures = columns(groups)
    objects = []
    for group in groups:
        record: dict[str, Any] = {
            "setting": group.label,
            "seeds": [run.seed for run in group.runs],
            "runs": [str(run.path) for run in group.runs],
            "steps": [max(run.rows) for run in group.runs],
        }
        for column in figures:
            record[column.name] = _record(column.values(group))
        objects.append(record)
    return objects


def _record(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.mean(values), "std": deviation}


def stuck_runs(groups: Sequence[RunGroup]) -> list[str]:
    """List why runs did not learn at their end, each reason as ``run: finding``."""
    lines = []
    for group in groups:
        for run in group.runs:
            # Step 0 is the validation before the training; its row has no update.
            training_rows = [row for step, row in run.rows.items() if step > 0]
            sentences = findings(training_rows, weights=reward_weights(run))
            lines += [f"{run.path.name}: {sentence}" for sentence in sentences]
    return lines


def reward_weights(run: RunLog) -> dict[str, float] | None:
    """Return the weights of a run's rewards, or None if its recipe has no task."""
    prefix = "nemo_grpo.rewards."
    weights = {}
    for key, value in run.settings.items():
        if key.startswith(prefix):
            weights[key.removeprefix(prefix)] = float(value)
    has_task = "nemo_grpo.task.name" in run.settings
    return weights if weights and has_task else None


def seconds(run: RunLog) -> float:
    """Return the seconds that a run spent in steps and validations."""
    return _sum(run, "time/step") + _sum(run, "time/validation")


def _sum(run: RunLog, key: str) -> float:
    return sum(run.points(key).values())


def _steps(group: RunGroup) -> str:
    steps = sorted({max(run.rows) for run in group.runs})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
