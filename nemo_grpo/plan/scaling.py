"""Strong and weak scaling with the best layout for each number of GPUs, as points and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_grpo.plan.forecast import Forecast, at_scale
from nemo_grpo.plan.layouts import accepted, best_layouts
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

PAYS = 0.5
"""Least share of the ideal speed-up at which more GPUs pay."""


@dataclass(frozen=True)
class Point:
    """One number of GPUs.

    Attributes:
        num_gpus: GPUs that train and sample.
        own: the recipe's layout with the same batch; None: it does not divide or fit the GPUs.
        strong: the best layout with the same batch; None: none fits.
        weak: the best layout with a batch that grows with the GPUs; None: none fits.
        strong_overrides: the recipe's keys for ``strong``.
        weak_overrides: the recipe's keys for ``weak``.
        strong_efficiency: tokens/s/GPU of ``strong``, relative to the first point with layouts.
        weak_efficiency: the same of ``weak``.
        note: sentence that more GPUs do not pay, or why there is no layout; else empty.
    """

    num_gpus: int
    own: Forecast | None = None
    strong: Forecast | None = None
    weak: Forecast | None = None
    strong_overrides: tuple[str, ...] = ()
    weak_overrides: tuple[str, ...] = ()
    strong_efficiency: float = 0.0
    weak_efficiency: float = 0.0
    note: str = ""


def scaling(recipe: Recipe, base: Forecast, gpu_counts: str) -> list[Point]:
    """Find the best layout at each number of GPUs, ascending, and forecast the recipe's own.

    Args:
        recipe: the recipe.
        base: its forecast.
        gpu_counts: numbers of GPUs, separated by commas.
    """
    counts = {int(part) if part.strip().isdecimal() else 0 for part in gpu_counts.split(",")}
    if min(counts) < 1:
        raise UserError(f"--scale {gpu_counts}: numbers of GPUs, such as 8,64,512")
    points: list[Point] = []
    first_strong: Forecast | None = None
    first_weak: Forecast | None = None
    previous: Forecast | None = None
    for count in sorted(counts):
        point = _point(recipe, base, count)
        if point.strong and point.weak:
            first_strong = first_strong or point.strong
            first_weak = first_weak or point.weak
            pays = previous is None or _pays(previous, point.strong)
            previous = point.strong
            point = replace(
                point,
                strong_efficiency=_relative_speed(point.strong, first_strong),
                weak_efficiency=_relative_speed(point.weak, first_weak),
                note="" if pays else "does not pay with this batch",
            )
        points.append(point)
    if previous is None:
        raise UserError(
            f"--scale {gpu_counts}: {points[0].note}; use multiples of {base.setup.gpus_per_node}"
        )
    return points


def _relative_speed(predicted: Forecast, first: Forecast) -> float:
    return predicted.step.tokens_per_second_per_gpu / first.step.tokens_per_second_per_gpu


def _pays(before: Forecast, after: Forecast) -> bool:
    """Return True if the speed-up is at least the share `PAYS` of what the added GPUs could give."""
    speed_up = before.step.seconds / after.step.seconds - 1
    ideal = after.step.num_gpus / before.step.num_gpus - 1
    return speed_up >= PAYS * ideal


def _point(recipe: Recipe, base: Forecast, count: int) -> Point:
    """Forecast the recipe's own layout and the best ones on this number of GPUs."""
    try:
        strong = at_scale(base, count)
        weak = at_scale(base, count, weak=True)
    except UserError as error:
        # The message is "--scale N: REASON; REMEDY"; the table has room for the reason.
        reason = str(error).partition(": ")[2].partition(";")[0]
        return Point(count, note=reason)
    grown_batch = (
        f"grpo.num_prompts_per_step={weak.work.num_samples // weak.work.group_size}",
        f"policy.train_global_batch_size={weak.work.num_samples // weak.work.num_updates}",
    )
    best_strong = best_layouts(recipe, strong, number=1)
    best_weak = best_layouts(recipe, weak, number=1, further=grown_batch)
    if not best_strong or not best_weak:
        return Point(count, note="no layout fits")
    own_layouts = list(accepted(recipe, [strong.setup], base.scenario.shape, base.scenario.hardware, 1))
    return Point(
        count,
        own=strong if own_layouts else None,
        strong=best_strong[0].forecast,
        weak=best_weak[0].forecast,
        strong_overrides=best_strong[0].overrides,
        weak_overrides=best_weak[0].overrides,
    )


def own_layout(points: Sequence[Point]) -> str:
    """Say at how many GPUs the recipe's own layout stops paying."""
    previous: Forecast | None = None
    for point in points:
        if point.strong is None:
            continue
        count = point.num_gpus
        best = f"{point.strong.step.seconds:.0f} s with the best one"
        if previous and point.own is None:
            return f"the recipe's own layout does not divide or fit {count} GPUs, {best}"
        if previous and point.own and not _pays(previous, point.own):
            seconds = f"{point.own.step.seconds:.0f} s per step"
            return f"the recipe's own layout stops paying at {count} GPUs: {seconds}, {best}"
        previous = point.own
    if previous is None:
        return "the recipe's own layout does not divide or fit any of these GPUs"
    return "the recipe's own layout pays on all of these GPUs"


def draw_scaling(points: Sequence[Point], file: Path, title: str) -> None:
    """Plot step time, efficiency and GPU-hours against GPUs, as a PNG."""
    from nemo_grpo.support import pictures as look

    complete = [(point, point.strong, point.weak) for point in points if point.strong and point.weak]
    gpus = [point.num_gpus for point, _, _ in complete]
    figure = look.new_figure(11, 3.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=look.INK)
    panels = {
        "seconds per step": [(strong.step.seconds, weak.step.seconds) for _, strong, weak in complete],
        "tokens/s/GPU, relative": [(p.strong_efficiency, p.weak_efficiency) for p, _, _ in complete],
        "GPU-hours of the run": [(strong.gpu_hours, weak.gpu_hours) for _, strong, weak in complete],
    }
    for axes, (name, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for index, (label, marker) in enumerate((("same batch", "o"), ("batch grows", "s"))):
            line = [pair[index] for pair in values]
            axes.plot(
                gpus,
                line,
                color=look.COLORS[index],
                ls=look.DASHES[index],
                marker=marker,
                ms=4.5,
                lw=1.9,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("GPUs", fontsize=9, color=look.INK)
        look.set_title(axes, name)
        look.tidy(axes)
    own_gpus = []
    own_seconds = []
    for point in points:
        if point.own:
            own_gpus.append(point.num_gpus)
            own_seconds.append(point.own.step.seconds)
    steps = figure.axes[0]
    label = "recipe's own layout"
    steps.plot(own_gpus, own_seconds, color=look.COMPANION, ls=look.DASHES[2], lw=1.3, label=label)
    steps.legend(frameon=False, fontsize=8.5, handlelength=3)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
    look.write_png(figure, file, dpi=130)
