"""Differences of settings from a baseline, paired by seed, with Student's t intervals."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_grpo.report.runs import Measure, Points, RunGroup, RunLog, measure_of, pass_key
from nemo_grpo.support.pictures import COLORS, COMPANION, INK, new_figure, set_title, tidy, write_png

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Relative spread up to which differences count as equal."""
FINAL, SAME_ROLLOUTS = "final", "final, same rollouts"
FOREST = "forest.png"
SHOWN = {
    FINAL: ("after the same steps", COLORS[0], "o", 0.13),
    SAME_ROLLOUTS: ("after the same rollouts", COLORS[1], "s", -0.13),
}
"""Figure -> name, colour, marker, and offset from the row's middle."""

PAIRED_NOTE = (
    "Setting minus baseline, paired by seed: mean and 95 % confidence interval (paired t). final, best and "
    "pass@k: up to the last step that both runs of a pair validated. Same rollouts: where the run that draws "
    "more had drawn as many responses as the other, linear between validations; its learning rate has not "
    "reached its end there. Each interval stands alone: of 20 settings that change nothing, one is expected "
    "to look different."
)

Pair = Callable[[RunLog, RunLog], tuple[float, float] | None]
"""One figure of two runs of the same seed; None if either lacks it."""


@dataclass(frozen=True)
class Difference:
    """Setting minus baseline over the seeds that both have.

    Attributes: by_seed: seed -> difference; not empty.  higher_is_better: else the verdict is the opposite.
        metric: its name in a sentence.
    """

    by_seed: Mapping[str, float]
    higher_is_better: bool = True
    metric: str = "accuracy"

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval mean -+ t s / sqrt(n), s the sample standard deviation of the differences.

        None if they do not vary: a single seed, or equal differences, as of accuracies on few problems.
        """
        n = len(self.by_seed)
        deviation = statistics.stdev(self.by_seed.values()) if n > 1 else 0.0
        if deviation <= ROUNDING * abs(self.mean):
            return None
        half = t_quantile(n - 1) * deviation / math.sqrt(n)
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> str:
        """Verdict ``better``, ``worse`` or ``cannot tell``, with the number of seeds."""
        n, interval = len(self.by_seed), self.interval
        word = "cannot tell"
        if interval is not None and not interval[0] <= 0 <= interval[1]:
            is_higher = interval[0] > 0
            word = "better" if is_higher == self.higher_is_better else "worse"
        return f"{word} at {n} seed{'s' if n > 1 else ''}"

    def cell(self, digits: int = 3) -> str:
        """Write ``+0.041 [+0.012, +0.070]``; the mean alone without an interval."""
        ends = self.interval
        mean = f"{self.mean:+,.{digits}f}"
        return mean if ends is None else f"{mean} [{ends[0]:+,.{digits}f}, {ends[1]:+,.{digits}f}]"


@dataclass(frozen=True)
class Paired:
    """One setting against the baseline.  Attributes: differences: figure -> difference, if known."""

    label: str
    differences: Mapping[str, Difference]


def t_quantile(df: int) -> float:
    """Compute the t with P(-t < T < t) = `CONFIDENCE` for Student's t with ``df`` >= 1 degrees of freedom.

    Bisects the closed form of P for whole df (Abramowitz and Stegun 26.7.3 and 26.7.4) in atan(t / sqrt(df)).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, df) < CONFIDENCE else (low, middle)
    return math.sqrt(df) * math.tan((low + high) / 2)


def _probability_within(angle: float, df: int) -> float:
    """Compute P(|T| < sqrt(df) tan(angle)): a sum of every second power of the cosine, below df - 1."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), df % 2
    term, total = cosine**odd, 0.0
    for power in range(odd, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _at_common_steps(key: str, pick: Callable[[Points], float]) -> Pair:
    def of(baseline: RunLog, run: RunLog) -> tuple[float, float] | None:
        ours, theirs = run.points(key), baseline.points(key)
        common = ours.keys() & theirs.keys()
        kept = [{step: points[step] for step in common} for points in (theirs, ours)]
        return (pick(kept[0]), pick(kept[1])) if common else None

    return of


def _last(points: Points) -> float:
    return points[max(points)]


def _at_same_rollouts(key: str) -> Pair:
    def of(baseline: RunLog, run: RunLog) -> tuple[float, float] | None:
        curves = [_by_rollouts(one, key) for one in (baseline, run)]
        if not all(curves):
            return None
        budget = min(max(curve) for curve in curves)
        if budget < max(min(curve) for curve in curves):
            return None  # one had no validation yet
        theirs, ours = (float(np.interp(budget, list(curve), list(curve.values()))) for curve in curves)
        return theirs, ours

    return of


def _by_rollouts(run: RunLog, key: str) -> Points:
    """Map the number of responses sampled before each validation to its metric; empty without counts."""
    drawn, total = run.points("rollout/num_prompts"), 0.0
    if not drawn:
        return {}
    responses = float(run.settings.get("grpo.num_generations_per_prompt", 1))
    curve: Points = {}
    for step, row in run.rows.items():
        total += drawn.get(step, 0.0) * responses
        if step in run.points(key):
            curve[int(total)] = row[key]
    return curve


def compare_groups(groups: Sequence[RunGroup], baseline: str) -> list[Paired]:
    """Compare every other group with the one labelled ``baseline``; none if that has no finished run.

    Final, best and same rollouts are of the metric that the recipes rank checkpoints by, see `measure_of`.
    """
    reference = next((group for group in groups if group.label == baseline), None)
    if reference is None:
        return []
    measure, passes = measure_of(groups), Measure(pass_key(groups))
    tokens = Measure("tokens/trained")
    figures: dict[str, tuple[Measure, Pair]] = {
        FINAL: (measure, _at_common_steps(measure.key, _last)),
        "best": (measure, _at_common_steps(measure.key, lambda points: measure.best(points.values()))),
        passes.name: (passes, _at_common_steps(passes.key, _last)),
        SAME_ROLLOUTS: (measure, _at_same_rollouts(measure.key)),
        "tokens trained": (tokens, _at_common_steps(tokens.key, _last)),
    }
    return [
        Paired(
            group.label,
            {
                name: found
                for name, (judged, of) in figures.items()
                if (found := _pair(reference, group, judged, of))
            },
        )
        for group in groups
        if group is not reference
    ]


def _pair(reference: RunGroup, group: RunGroup, measure: Measure, of: Pair) -> Difference | None:
    theirs = {run.seed: run for run in reference.runs}
    found = {run.seed: of(theirs[run.seed], run) for run in group.runs if run.seed in theirs}
    differences = {seed: pair[1] - pair[0] for seed, pair in found.items() if pair is not None}
    return Difference(differences, measure.higher_is_better, measure.name) if differences else None


def paired_table(paired: Sequence[Paired], baseline: str) -> tuple[list[str], list[list[str]]]:
    """Make head and rows as texts: a column per figure that any setting has."""
    names = list(dict.fromkeys(name for one in paired for name in one.differences))
    digits = {name: 0 if name.startswith("tokens") else 3 for name in names}

    def cell(one: Paired, name: str) -> str:
        return one.differences[name].cell(digits[name]) if name in one.differences else "-"

    return [f"minus {baseline}", *names], [[one.label, *(cell(one, n) for n in names)] for one in paired]


def sentences(paired: Sequence[Paired], baseline: str) -> list[str]:
    """Write a line per setting: its verdict by the final metric, and by that at the same rollouts."""
    lines = []
    for one in paired:
        verdicts = [
            f"{found.verdict} by {found.metric} after the same {what}, {found.cell()}"
            for name, what in ((FINAL, "steps"), (SAME_ROLLOUTS, "rollouts"))
            if (found := one.differences.get(name))
        ]
        text = "; ".join(verdicts) or "cannot tell, no seed in common with a validation"
        lines.append(f"{one.label} against {baseline}: {text}.")
    return lines


def paired_records(paired: Sequence[Paired], baseline: str) -> dict[str, Any]:
    """Convert to JSON's types: every difference by seed, its mean, interval and verdict."""
    return {
        "baseline": baseline,
        "confidence": CONFIDENCE,
        "settings": {
            one.label: {
                name: {
                    "metric": found.metric,
                    "higher_is_better": found.higher_is_better,
                    "by_seed": dict(found.by_seed),
                    "mean": found.mean,
                    "interval": found.interval,
                    "verdict": found.verdict,
                }
                for name, found in one.differences.items()
            }
            for one in paired
        },
    }


def draw_forest(paired: Sequence[Paired], baseline: str, path: Path) -> None:
    """Draw the forest plot: a row per setting, the baseline a line at 0; filled marks exclude 0.

    Args: paired: at least one, the first on top.
    """
    figure = new_figure(5.6, 1.6 + 0.45 * len(paired))
    axes = figure.add_subplot()
    axes.axvline(0, color=COMPANION, lw=1.1, zorder=1)
    for name, (label, color, marker, height) in SHOWN.items():
        there = [(row, one.differences[name]) for row, one in enumerate(paired) if name in one.differences]
        for row, found in there:
            low, high = found.interval or (found.mean, found.mean)
            axes.plot([low, high], [height - row] * 2, color=color, lw=1.8, solid_capstyle="butt")
            fill = "white" if low <= 0 <= high or found.interval is None else color
            axes.plot(found.mean, height - row, marker=marker, ms=6, color=color, mfc=fill, ls="")
        if there:
            axes.plot([], [], color=color, marker=marker, ms=6, mfc="white", lw=1.8, label=label)
    seeds = [max((len(d.by_seed) for d in one.differences.values()), default=0) for one in paired]
    names = [f"{one.label} (n={number})" for one, number in zip(paired, seeds, strict=True)]
    axes.set_yticks([-row for row in range(len(paired))], names)
    axes.set_ylim(0.6 - len(paired), 0.6)
    metrics = {one.differences[FINAL].metric for one in paired if FINAL in one.differences}
    metric = min(metrics, default=Measure().name)  # one metric judges all settings
    label = f"difference in held-out {metric},\nmean and 95 % interval over paired seeds; filled: excludes 0"
    axes.set_xlabel(label, fontsize=9, color=INK)
    set_title(axes, f"Against {baseline}")
    if axes.get_legend_handles_labels()[0]:
        place: Any = "outside lower center"
        figure.legend(loc=place, ncols=2, frameon=False, fontsize=8.5)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    write_png(figure, path, dpi=200)
