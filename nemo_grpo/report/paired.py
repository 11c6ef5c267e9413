"""Differences of settings from a baseline, paired by seed, with Student's t intervals."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from nemo_grpo.report.runs import Measure, Points, RunGroup, RunLog, measure_of, pass_key
from nemo_grpo.support.pictures import COLORS, COMPANION, INK, new_figure, set_title, tidy, write_png

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Relative spread up to which differences count as equal."""
FINAL = "final"
SAME_ROLLOUTS = "final, same rollouts"
FOREST = "forest.png"
FOREST_MARKS = {
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
    """Differences of one figure, setting minus baseline, for the seeds that both have.

    Attributes:
        by_seed: seed -> difference; not empty.
        higher_is_better: False for a loss, for which a positive difference is worse.
        metric: name of the metric in a sentence.
    """

    by_seed: Mapping[str, float]
    higher_is_better: bool = True
    metric: str = "accuracy"

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval mean -+ t s / sqrt(n), with s the sample standard deviation of the differences.

        It is None if there is a single seed, or if all differences are equal, which happens to accuracies on
        few problems.
        """
        n = len(self.by_seed)
        if n == 1:
            return None
        deviation = statistics.stdev(self.by_seed.values())
        # Differences that are equal except for rounding would give an interval of almost no width, and so a
        # verdict that looks certain.
        if deviation <= ROUNDING * abs(self.mean):
            return None
        half = t_quantile(n - 1) * deviation / math.sqrt(n)
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> str:
        """Verdict ``better``, ``worse`` or ``cannot tell``, with the number of seeds."""
        n = len(self.by_seed)
        interval = self.interval
        word = "cannot tell"
        if interval is not None and not interval[0] <= 0 <= interval[1]:
            is_higher = interval[0] > 0
            word = "better" if is_higher == self.higher_is_better else "worse"
        seeds = "seed" if n == 1 else "seeds"
        return f"{word} at {n} {seeds}"

    def cell(self, digits: int = 3) -> str:
        """Write mean and interval as ``+0.041 [+0.012, +0.070]``. Without an interval write only the mean."""
        mean = f"{self.mean:+,.{digits}f}"
        if self.interval is None:
            return mean
        low, high = self.interval
        return f"{mean} [{low:+,.{digits}f}, {high:+,.{digits}f}]"


@dataclass(frozen=True)
class Paired:
    """One setting against the baseline.

    Attributes:
        label: label of the setting.
        differences: name of a figure -> differences. Figures that no pair of runs has are left out.
    """

    label: str
    differences: Mapping[str, Difference]


def t_quantile(df: int) -> float:
    """Compute t with P(-t < T < t) = `CONFIDENCE`, for a Student's T with ``df`` >= 1 degrees of freedom.

    For a whole df, P has a closed form in the angle atan(t / sqrt(df)): Abramowitz and Stegun 26.7.3 and
    26.7.4.
    """
    # Bisection needs bounds. The angle has them, t does not.
    low = 0.0
    high = math.pi / 2
    for _ in range(60):  # halves the interval below the precision of a double
        middle = (low + high) / 2
        if _probability_within(middle, df) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)


def _probability_within(angle: float, df: int) -> float:
    """Compute P(|T| < sqrt(df) tan(angle)), a sum over every second power of the cosine up to df - 2.

    Odd df:   2/pi (angle + sine (cosine + 2/3 cosine^3 + ... ))      26.7.3
    Even df:  sine (1 + 1/2 cosine^2 + 3/8 cosine^4 + ...)            26.7.4
    """
    sine = math.sin(angle)
    cosine = math.cos(angle)
    first_power = df % 2
    term = cosine**first_power
    total = 0.0
    for power in range(first_power, df - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    if df % 2 == 1:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def _at_common_steps(key: str, pick: Callable[[Points], float]) -> Pair:
    """Make a function that compares two runs at steps that both have validated; `pick` chooses a value."""

    def pair(baseline_run: RunLog, run: RunLog) -> tuple[float, float] | None:
        baseline_points = baseline_run.points(key)
        points = run.points(key)
        common = baseline_points.keys() & points.keys()
        if not common:
            return None
        # Only common steps, because a run with more validations has a better chance of a high value.
        baseline_common = {step: baseline_points[step] for step in common}
        run_common = {step: points[step] for step in common}
        return pick(baseline_common), pick(run_common)

    return pair


def _last(points: Points) -> float:
    return points[max(points)]


def _at_same_rollouts(key: str) -> Pair:
    """Make a function that compares two runs after equally many sampled responses.

    The number is the total of the run that samples less.
    """

    def pair(baseline_run: RunLog, run: RunLog) -> tuple[float, float] | None:
        baseline_curve = _by_rollouts(baseline_run, key)
        curve = _by_rollouts(run, key)
        if not baseline_curve or not curve:
            return None
        budget = min(max(baseline_curve), max(curve))
        first_in_both = max(min(baseline_curve), min(curve))
        # One run had no validation yet when the other ended.
        if budget < first_in_both:
            return None
        return _interpolated(baseline_curve, budget), _interpolated(curve, budget)

    return pair


def _interpolated(curve: Points, num_responses: int) -> float:
    return float(np.interp(num_responses, list(curve), list(curve.values())))


def _by_rollouts(run: RunLog, key: str) -> Points:
    """Map the number of responses sampled before each validation to its metric; empty if it is not logged."""
    prompts_by_step = run.points("rollout/num_prompts")
    if not prompts_by_step:
        return {}
    responses_per_prompt = float(run.settings.get("grpo.num_generations_per_prompt", 1))
    validated_steps = run.points(key)
    total = 0.0
    curve: Points = {}
    for step, row in run.rows.items():
        total += prompts_by_step.get(step, 0.0) * responses_per_prompt
        if step in validated_steps:
            curve[int(total)] = row[key]
    return curve


def compare_groups(groups: Sequence[RunGroup], baseline: str) -> list[Paired]:
    """Compare every other group with the one labelled ``baseline``. Without that group the list is empty.

    The figures "final", "best" and "same rollouts" use the metric that ranks checkpoints, see `measure_of`.
    """
    baseline_groups = [group for group in groups if group.label == baseline]
    if not baseline_groups:
        return []
    baseline_group = baseline_groups[0]
    measure = measure_of(groups)
    passes = Measure(pass_key(groups))
    tokens = Measure("tokens/trained")
    figures: dict[str, tuple[Measure, Pair]] = {
        FINAL: (measure, _at_common_steps(measure.key, _last)),
        "best": (measure, _at_common_steps(measure.key, lambda points: measure.best(points.values()))),
        passes.name: (passes, _at_common_steps(passes.key, _last)),
        SAME_ROLLOUTS: (measure, _at_same_rollouts(measure.key)),
        "tokens trained": (tokens, _at_common_steps(tokens.key, _last)),
    }
    comparisons = []
    for group in groups:
        if group is baseline_group:
            continue
        differences = {}
        for name, (figure_measure, pair) in figures.items():
            difference = _difference(baseline_group, group, figure_measure, pair)
            if difference is not None:
                differences[name] = difference
        comparisons.append(Paired(group.label, differences))
    return comparisons


def _difference(baseline_group: RunGroup, group: RunGroup, measure: Measure, pair: Pair) -> Difference | None:
    """Subtract the baseline from a setting, seed by seed. Returns None if no seed has both values."""
    baseline_runs = {run.seed: run for run in baseline_group.runs}
    by_seed = {}
    for run in group.runs:
        values = pair(baseline_runs[run.seed], run) if run.seed in baseline_runs else None
        if values is not None:
            by_seed[run.seed] = values[1] - values[0]
    return Difference(by_seed, measure.higher_is_better, measure.name) if by_seed else None


def paired_table(paired: Sequence[Paired], baseline: str) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table, with a column for each figure that any setting has."""
    # A dict drops repetitions and keeps the order, which a set would lose.
    names = list(dict.fromkeys(name for setting in paired for name in setting.differences))
    rows = []
    for setting in paired:
        cells = []
        for name in names:
            digits = 0 if name.startswith("tokens") else 3
            difference = setting.differences.get(name)
            cells.append("-" if difference is None else difference.cell(digits))
        rows.append([setting.label, *cells])
    return [f"minus {baseline}", *names], rows


def sentences(paired: Sequence[Paired], baseline: str) -> list[str]:
    """Write one line per setting, with its verdicts by the final metric and by the one at equal rollouts."""
    lines = []
    for setting in paired:
        verdicts = []
        for name, budget in ((FINAL, "steps"), (SAME_ROLLOUTS, "rollouts")):
            difference = setting.differences.get(name)
            if difference is not None:
                verdict = f"{difference.verdict} by {difference.metric}"
                verdicts.append(f"{verdict} after the same {budget}, {difference.cell()}")
        if not verdicts:
            verdicts.append("cannot tell, no seed in common with a validation")
        lines.append(f"{setting.label} against {baseline}: {'; '.join(verdicts)}.")
    return lines


def paired_records(paired: Sequence[Paired], baseline: str) -> dict[str, Any]:
    """Convert the differences to JSON's types, each with its values by seed, mean, interval and verdict."""
    settings = {}
    for setting in paired:
        settings[setting.label] = {
            name: _record(difference) for name, difference in setting.differences.items()
        }
    return {"baseline": baseline, "confidence": CONFIDENCE, "settings": settings}


def _record(difference: Difference) -> dict[str, Any]:
    return {
        "metric": difference.metric,
        "higher_is_better": difference.higher_is_better,
        "by_seed": dict(difference.by_seed),
        "mean": difference.mean,
        "interval": difference.interval,
        "verdict": difference.verdict,
    }


def draw_forest(paired: Sequence[Paired], baseline: str, path: Path) -> None:
    """Draw the forest plot: one row per setting, and a line at 0 for the baseline.

    A mark is filled if its interval excludes 0.

    Args:
        paired: at least one setting; the first is on top.
    """
    figure = new_figure(5.6, 1.6 + 0.45 * len(paired))
    axes = figure.add_subplot()
    axes.axvline(0, color=COMPANION, lw=1.1, zorder=1)
    for name in FOREST_MARKS:
        _draw_marks(axes, paired, name)
    axes.set_yticks([-row for row in range(len(paired))], [_row_label(setting) for setting in paired])
    axes.set_ylim(0.6 - len(paired), 0.6)
    # All settings are judged by one metric, so this set has at most one name.
    metrics = {setting.differences[FINAL].metric for setting in paired if FINAL in setting.differences}
    metric = min(metrics, default=Measure().name)
    label = f"difference in held-out {metric},\nmean and 95 % interval over paired seeds; filled: excludes 0"
    axes.set_xlabel(label, fontsize=9, color=INK)
    set_title(axes, f"Against {baseline}")
    if axes.get_legend_handles_labels()[0]:
        place: Any = "outside lower center"
        figure.legend(loc=place, ncols=2, frameon=False, fontsize=8.5)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    write_png(figure, path, dpi=200)


def _draw_marks(axes: Axes, paired: Sequence[Paired], name: str) -> None:
    """Draw mean and interval of one figure into the row of each setting that has it."""
    label, color, marker, offset = FOREST_MARKS[name]
    is_drawn = False
    for row, setting in enumerate(paired):
        if name not in setting.differences:
            continue
        difference = setting.differences[name]
        low, high = difference.interval or (difference.mean, difference.mean)
        height = offset - row
        axes.plot([low, high], [height, height], color=color, lw=1.8, solid_capstyle="butt")
        includes_zero = low <= 0 <= high or difference.interval is None
        fill = "white" if includes_zero else color
        axes.plot(difference.mean, height, marker=marker, ms=6, color=color, mfc=fill, ls="")
        is_drawn = True
    if is_drawn:
        # This line has no points. It only gives the legend a mark that is not filled.
        axes.plot([], [], color=color, marker=marker, ms=6, mfc="white", lw=1.8, label=label)


def _row_label(setting: Paired) -> str:
    num_seeds = [len(difference.by_seed) for difference in setting.differences.values()]
    return f"{setting.label} (n={max(num_seeds, default=0)})"
