"""Curves of a run, or of several groups of runs on common axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nemo_grpo.report.runs import RunGroup, common_key, matching, pass_key
from nemo_grpo.support.extensions import is_reference
from nemo_grpo.support.pictures import (
    COLORS,
    COMPANION,
    DASHES,
    INK,
    MARKERS,
    new_figure,
    set_title,
    tidy,
    write_png,
)

MAX_BANDS = 5
"""Most groups with bands in the training metrics; more would hide each other."""
MAX_PALE = 2
"""Most groups with single steps behind the running means."""

METRIC_HEIGHT = 15
"""Points between a panel's axes and its title, for the metric's name."""
PANEL_SIZE = (4.4, 3.2)
"""Inches of a panel without its legend; its text is readable at a phone's width."""
LEGEND_LETTERS, LEGEND_HANDLE, LEGEND_ROW = 12, 9, 0.23
"""Letters per inch of a legend, the width of a label's line in letters, and the inches of a row."""

Draw = Callable[[Axes, Sequence[RunGroup], Sequence[str]], str]
"""Draws a panel and returns the name of the metric for its title; empty: no name."""


@dataclass(frozen=True)
class Style:
    """Style of one group in every panel."""

    color: str
    dash: Any
    marker: str


def style_of(index: int) -> Style:
    """Choose colour, dash and marker of group number ``index``; the first 32 are distinct."""
    dash = DASHES[(index + index // len(COLORS)) % len(DASHES)]
    return Style(COLORS[index % len(COLORS)], dash, MARKERS[index % len(MARKERS)])


def draw_validation(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw the mean over seeds, a band of one standard deviation.

    A single group's accuracy has greedy and pass@k beside it.
    """
    has_companions = len(groups) == 1 and keys[0].endswith("/accuracy")
    for index, group in enumerate(groups):
        style = style_of(index)
        steps, mean, spread = group.curve(keys[0])
        label = "mean of samples" if has_companions else None
        axes.plot(
            steps, mean, color=style.color, ls=style.dash, marker=style.marker, ms=4.5, lw=1.9, label=label
        )
        if spread.any():
            axes.fill_between(steps, mean - spread, mean + spread, color=style.color, alpha=0.16, lw=0)
    if has_companions:
        above = keys[0].rpartition("/")[0]
        for name, dash in (("greedy", DASHES[1]), (pass_key(groups).rpartition("/")[2], DASHES[2])):
            key = f"{above}/{name}"
            steps, mean, _ = groups[0].curve(key)
            if len(steps):
                axes.plot(steps, mean, color=COMPANION, ls=dash, lw=1.3, label=key.rpartition("/")[2])
        axes.legend(frameon=False, fontsize=8.5, handlelength=3)
    return keys[0]


def draw_training(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw the running mean of one metric, `common_key`, over single steps or the spread of the seeds."""
    key = common_key(groups, keys)
    for index, group in enumerate(groups):
        style = style_of(index)
        steps, mean, spread = group.curve(key)
        smooth = running_mean(mean)
        if spread.any() and len(groups) <= MAX_BANDS:
            half = running_mean(spread)
            axes.fill_between(steps, smooth - half, smooth + half, color=style.color, alpha=0.14, lw=0)
        elif len(groups) <= MAX_PALE:
            axes.plot(steps, mean, color=style.color, alpha=0.28, lw=0.8)
        marker = style.marker if len(steps) == 1 else ""
        axes.plot(steps, smooth, color=style.color, ls=style.dash, lw=1.7, marker=marker, ms=4.5)
    return key


def draw_percentiles(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw a line per percentile, their range shaded; the axis is linear near 0 and logarithmic beyond."""
    for index, group in enumerate(groups):
        style = style_of(index)
        curves = [(steps, running_mean(mean)) for steps, mean, _ in map(group.curve, keys) if len(steps)]
        for steps, smooth in curves:
            axes.plot(steps, smooth, color=style.color, ls=style.dash, lw=1.1)
        if len(groups) <= MAX_PALE and len(curves) > 1 and len(curves[0][0]) == len(curves[-1][0]):
            steps, lowest, highest = curves[0][0], curves[0][1], curves[-1][1]
            axes.fill_between(steps, lowest, highest, color=style.color, alpha=0.1, lw=0)
    axes.set_yscale("symlog", linthresh=0.1)
    return " ".join([keys[0], *(key.rpartition("/")[2] for key in keys[1:])])


def running_mean(values: np.ndarray) -> np.ndarray:
    """Compute a centred mean over about a fifteenth of the run, over fewer values at its ends."""
    half = len(values) // 30
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


@dataclass(frozen=True)
class Panel:
    """One plot of the report.

    Attributes:
        name: file name of its PNG.
        title, unit: title, and label of the y axis.
        keys: metrics of metrics.jsonl; alternatives for `draw_training`.
        each: pattern of metrics, in place of ``keys``; see `of_each`.
        of_own_loss: only runs with a loss of the user's own count for ``each``.
        explanation: a sentence for the report.
        draw: function that draws it.
        from_zero: the y axis starts at 0.
        xlabel: label of the x axis.
        of_diagnostics: drawn from diagnostics.jsonl; ``keys`` name its parts.
    """

    name: str
    title: str
    unit: str
    keys: tuple[str, ...] = ()
    explanation: str = ""
    draw: Draw = draw_training
    from_zero: bool = False
    xlabel: str = "training step"
    of_diagnostics: bool = False
    each: str = ""
    of_own_loss: bool = False

    def of_each(self, groups: Sequence[RunGroup]) -> list[Self]:
        """List a panel for each metric that `each` matches, named by its group; else the panel itself."""
        if not self.each:
            return [self]
        if self.of_own_loss:
            groups = [group for group in groups if is_reference(group.runs[0].variant)]
        return [
            replace(
                self,
                name=f"{self.name}-{quote(match[1], safe='')}",
                title=self.title.format(match[1]),
                keys=(match[0],),
            )
            for match in matching(groups, self.each)
        ]

    def is_filled(self, groups: Sequence[RunGroup]) -> bool:
        """True if any run has a value to draw."""
        if self.of_diagnostics:
            return any(run.diagnostics for group in groups for run in group.runs)
        return any(run.points(key) for group in groups for run in group.runs for key in self.keys)

    def is_always_zero(self, groups: Sequence[RunGroup]) -> bool:
        """True if there are values and all are 0, which a sentence says as well as a picture.

        Held-out measures are drawn even then: a flat line at 0 is the result.
        """
        if self.of_diagnostics or self.draw is draw_validation or not self.is_filled(groups):
            return False
        curves = [run.points(key) for group in groups for run in group.runs for key in self.keys]
        return not any(value for points in curves for value in points.values())


def draw_panel(panel: Panel, groups: Sequence[RunGroup], path: Path) -> None:
    """Write one panel as a picture of its own."""
    figure = new_figure(*PANEL_SIZE)
    axes = figure.add_subplot()
    _fill(axes, panel, groups)
    axes.set_xlabel(panel.xlabel, fontsize=9, color=INK)
    rows = _add_legend(figure, groups, columns=4)
    figure.set_figheight(PANEL_SIZE[1] + LEGEND_ROW * rows)
    write_png(figure, path, dpi=200)


def draw_overview(panels: Sequence[Panel], groups: Sequence[RunGroup], path: Path) -> None:
    """Write several panels as small multiples in one picture, with one legend."""
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = new_figure(4.1 * columns, 3.05 * rows + 0.5)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08, h_pad=0.12)  # inches; closer, a title reads as the caption of the panel above
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        _fill(axes, panel, groups)
        if number > len(panels) - columns or panel.xlabel != Panel.xlabel:
            axes.set_xlabel(panel.xlabel)
    _add_legend(figure, groups, columns=5)
    write_png(figure, path, dpi=130)


def _add_legend(figure: Figure, groups: Sequence[RunGroup], columns: int) -> int:
    """Name the groups below the axes, if there are several; returns the legend's rows."""
    if len(groups) == 1:
        return 0
    styles = [style_of(index) for index in range(len(groups))]
    handles = [
        Line2D([], [], color=s.color, ls=s.dash, marker=s.marker, ms=4.5, lw=1.8, label=_seeds_label(group))
        for s, group in zip(styles, groups, strict=True)
    ]
    place: Any = "outside lower center"
    longest = max(len(_seeds_label(group)) for group in groups) + LEGEND_HANDLE
    columns = max(1, min(columns, len(groups), int(LEGEND_LETTERS * figure.get_figwidth() / longest)))
    figure.legend(handles=handles, loc=place, ncols=columns, handlelength=3, fontsize=9, frameon=False)
    return -(-len(groups) // columns)


def _seeds_label(group: RunGroup) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label}, {len(group.runs)} seeds"


def _fill(axes: Axes, panel: Panel, groups: Sequence[RunGroup]) -> None:
    metric = panel.draw(axes, groups, panel.keys)
    # Below the title; beside it, the two would overlap.
    axes.text(0, 1.02, metric, transform=axes.transAxes, fontsize=7.5, color=COMPANION)
    set_title(axes, panel.title, METRIC_HEIGHT)
    axes.set_ylabel(panel.unit, fontsize=9, color=INK)
    axes.margins(x=0.02)
    if not panel.of_diagnostics:
        axes.set_xticks(step_ticks(axes))
    if panel.from_zero:
        axes.set_ylim(top=max(axes.get_ylim()[1], 0.01))
    if panel.from_zero or _is_never_negative(axes):
        axes.set_ylim(bottom=0)
        for line in axes.lines:
            line.set_clip_on(False)  # a line at 0 stays visible
    tidy(axes)


def step_ticks(axes: Axes) -> list[float]:
    """Choose round numbers of steps, and the last step in place of ticks that it would touch."""
    lines = (np.asarray(line.get_xdata()) for line in axes.lines)
    last = max((float(x.max()) for x in lines if x.size), default=0.0)
    first, _ = axes.get_xlim()
    if last - first < 1:
        return [last]
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(first, last)
    room = 0.6 * (ticks[1] - ticks[0])
    return [*(tick for tick in ticks if first <= tick <= last - room), last]


def _is_never_negative(axes: Axes) -> bool:
    """True for lines at or above 0 whose axis would begin below 0."""
    lines = (np.asarray(line.get_ydata()) for line in axes.lines)
    lowest = min((np.nanmin(y) for y in lines if y.size), default=-1.0)
    return axes.get_yscale() == "linear" and axes.get_ylim()[0] < 0 <= lowest
