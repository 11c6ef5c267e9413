"""Curves of a run, or of several groups of runs on common axes."""

import math
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
LEGEND_LETTERS = 12
"""Letters per inch of a legend."""
LEGEND_HANDLE = 9
"""Width of the line before a legend's label, in letters."""
LEGEND_ROW = 0.23
"""Inches of a legend's row."""

Draw = Callable[[Axes, Sequence[RunGroup], Sequence[str]], str]
"""Draws a panel and returns the name of the metric for its title; empty: no name."""


@dataclass(frozen=True)
class Style:
    """Colour, dash and marker of one group, the same in every panel."""

    color: str
    dash: Any
    marker: str


def style_of(index: int) -> Style:
    """Choose colour, dash and marker of group number ``index``; the first 32 are distinct."""
    # Eight colours are a multiple of four dashes, so colour and dash would repeat together. Therefore the
    # dashes shift by one whenever the colours start again.
    dash = DASHES[(index + index // len(COLORS)) % len(DASHES)]
    return Style(COLORS[index % len(COLORS)], dash, MARKERS[index % len(MARKERS)])


def draw_validation(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw the mean over seeds, with a band of one standard deviation.

    For a single group, the accuracy is shown together with greedy and pass@k.
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
        validation_set = keys[0].rpartition("/")[0]
        pass_at_k = pass_key(groups).rpartition("/")[2]
        for name, dash in (("greedy", DASHES[1]), (pass_at_k, DASHES[2])):
            steps, mean, _ = groups[0].curve(f"{validation_set}/{name}")
            if len(steps):
                axes.plot(steps, mean, color=COMPANION, ls=dash, lw=1.3, label=name)
        axes.legend(frameon=False, fontsize=8.5, handlelength=3)
    return keys[0]


def draw_training(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw the running mean of the first of ``keys`` that the groups have (`common_key`).

    Behind it are the single steps of one run, or the spread of several seeds.
    """
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
        # A line through one point is invisible.
        marker = style.marker if len(steps) == 1 else ""
        axes.plot(steps, smooth, color=style.color, ls=style.dash, lw=1.7, marker=marker, ms=4.5)
    return key


def draw_percentiles(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw one line per percentile and shade their range. The axis is logarithmic, but linear near 0."""
    for index, group in enumerate(groups):
        style = style_of(index)
        curves = []
        for key in keys:
            steps, mean, _ = group.curve(key)
            if len(steps):
                curves.append((steps, running_mean(mean)))
        for steps, smooth in curves:
            axes.plot(steps, smooth, color=style.color, ls=style.dash, lw=1.1)
        if len(groups) <= MAX_PALE and len(curves) > 1:
            steps, lowest = curves[0]
            highest_steps, highest = curves[-1]
            # A run may lack a percentile at some steps; a shade needs both ends at each.
            if len(steps) == len(highest_steps):
                axes.fill_between(steps, lowest, highest, color=style.color, alpha=0.1, lw=0)
    # Most values are near 0, while the outermost percentiles are orders of magnitude larger, on both sides.
    axes.set_yscale("symlog", linthresh=0.1)
    percentiles = [key.rpartition("/")[2] for key in keys[1:]]
    return " ".join([keys[0], *percentiles])


def running_mean(values: np.ndarray) -> np.ndarray:
    """Compute a centred mean over about a fifteenth of the run. At its ends it has fewer values."""
    half = len(values) // 30
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


@dataclass(frozen=True)
class Panel:
    """One plot of the report.

    Attributes:
        name: file name of its PNG.
        title, unit: title, and label of the y axis.
        keys: metrics of metrics.jsonl to draw; `draw_training` draws the first one that the runs have.
        each: pattern of metrics, in place of ``keys``, that gives a panel for each; see `of_each`.
        of_own_loss: ``each`` only looks at runs with a user-defined loss.
        explanation: a sentence for the report.
        draw: function that draws it.
        from_zero: True if the y axis starts at 0.
        xlabel: label of the x axis.
        of_diagnostics: True if the data come from diagnostics.jsonl; then ``keys`` name its parts.
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
        """List one panel for each metric that `each` matches, named by the pattern's group.

        Without `each` the list is the panel itself.
        """
        if not self.each:
            return [self]
        if self.of_own_loss:
            groups = [group for group in groups if is_reference(group.runs[0].variant)]
        panels = []
        for match in matching(groups, self.each):
            # Quoted, because the name becomes a file name, and a metric's name may contain a slash.
            name = f"{self.name}-{quote(match[1], safe='')}"
            panels.append(replace(self, name=name, title=self.title.format(match[1]), keys=(match[0],)))
        return panels

    def is_filled(self, groups: Sequence[RunGroup]) -> bool:
        """Return True if any run has a value to draw."""
        runs = [run for group in groups for run in group.runs]
        if self.of_diagnostics:
            return any(run.diagnostics for run in runs)
        return any(run.points(key) for run in runs for key in self.keys)

    def is_always_zero(self, groups: Sequence[RunGroup]) -> bool:
        """Return True if there are values and all are 0, so that a sentence can replace the picture.

        Held-out measures never count as such, because for them a flat line at 0 is the result.
        """
        if self.of_diagnostics or self.draw is draw_validation or not self.is_filled(groups):
            return False
        runs = [run for group in groups for run in group.runs]
        curves = [run.points(key) for run in runs for key in self.keys]
        return not any(value for points in curves for value in points.values())


def draw_panel(panel: Panel, groups: Sequence[RunGroup], path: Path) -> None:
    """Write one panel as a picture."""
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
    rows = max(1, math.ceil(len(panels) / columns))
    figure = new_figure(4.1 * columns, 3.05 * rows + 0.5)
    engine: Any = figure.get_layout_engine()
    # In inches. With less space a title looks like the caption of the panel above it.
    engine.set(w_pad=0.08, h_pad=0.12)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        _fill(axes, panel, groups)
        # Panels above the lowest one of their column need no label if they have the same axis.
        is_lowest = number > len(panels) - columns
        if is_lowest or panel.xlabel != Panel.xlabel:
            axes.set_xlabel(panel.xlabel)
    _add_legend(figure, groups, columns=5)
    write_png(figure, path, dpi=130)


def _add_legend(figure: Figure, groups: Sequence[RunGroup], columns: int) -> int:
    """Add a legend of the groups below the axes, if there are several; returns its number of rows."""
    if len(groups) == 1:
        return 0
    labels = [_seeds_label(group) for group in groups]
    handles = []
    for index, label in enumerate(labels):
        style = style_of(index)
        line = {"color": style.color, "ls": style.dash, "marker": style.marker}
        handles.append(Line2D([], [], **line, ms=4.5, lw=1.8, label=label))
    longest = max(len(label) for label in labels) + LEGEND_HANDLE
    columns_that_fit = int(LEGEND_LETTERS * figure.get_figwidth() / longest)
    columns = max(1, min(columns, len(groups), columns_that_fit))
    place: Any = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=columns, handlelength=3, fontsize=9, frameon=False)
    return math.ceil(len(groups) / columns)


def _seeds_label(group: RunGroup) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label}, {len(group.runs)} seeds"


def _fill(axes: Axes, panel: Panel, groups: Sequence[RunGroup]) -> None:
    """Draw a panel with its title, labels and limits."""
    metric = panel.draw(axes, groups, panel.keys)
    # The name is below the title, because beside it the two would overlap.
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
            # Without clipping, the axis does not cover the lower half of a line at 0.
            line.set_clip_on(False)
    tidy(axes)


def step_ticks(axes: Axes) -> list[float]:
    """Choose ticks at round numbers of steps and at the last step, without round ones too close to that."""
    steps = [np.asarray(line.get_xdata()) for line in axes.lines]
    last = max((float(x.max()) for x in steps if x.size), default=0.0)
    first, _ = axes.get_xlim()
    if last - first < 1:
        return [last]
    round_ticks = MaxNLocator(nbins=6, integer=True).tick_values(first, last)
    label_width = 0.6 * (round_ticks[1] - round_ticks[0])
    ticks = [tick for tick in round_ticks if first <= tick <= last - label_width]
    return [*ticks, last]


def _is_never_negative(axes: Axes) -> bool:
    """Return True if no line goes below 0, but the axis would begin below 0."""
    values = [np.asarray(line.get_ydata()) for line in axes.lines]
    lowest = min((np.nanmin(y) for y in values if y.size), default=-1.0)
    begins_below_zero = axes.get_ylim()[0] < 0
    return axes.get_yscale() == "linear" and begins_below_zero and lowest >= 0
