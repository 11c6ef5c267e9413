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

    Attributes: own: the recipe's layout with the same batch; None: it does not divide or fit the GPUs.
                strong, weak: the best layout with the same batch, and with one that grows; None: none fits.
                strong_efficiency, weak_efficiency: tokens/s/GPU, relative to the first point with layouts.
                note: that these GPUs do not pay, or why there is no layout.
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


def scaling(recipe: Recipe, base: Forecast, asked: str) -> list[Point]:
    """Find the best layout at each number of GPUs, ascending, and forecast the recipe's own.

    Args:   asked: the numbers, with commas.
    """
    counts = {int(part) if part.strip().isdecimal() else 0 for part in asked.split(",")}
    if min(counts) < 1:
        raise UserError(f"--scale {asked}: numbers of GPUs, such as 8,64,512")
    points: list[Point] = []
    first: tuple[float, float] | None = None
    last: Forecast | None = None
    for count in sorted(counts):
        point = _point(recipe, base, count)
        if point.strong and point.weak:
            speeds = point.strong.step.tokens_per_second_per_gpu, point.weak.step.tokens_per_second_per_gpu
            first = first or speeds
            pays = last is None or _pays(last, point.strong)
            last = point.strong
            point = replace(
                point,
                strong_efficiency=speeds[0] / first[0],
                weak_efficiency=speeds[1] / first[1],
                note="" if pays else "does not pay with this batch",
            )
        points.append(point)
    if first is None:
        raise UserError(f"--scale {asked}: {points[0].note}; use multiples of {base.setup.gpus_per_node}")
    return points


def _pays(before: Forecast, after: Forecast) -> bool:
    grown = before.step.seconds / after.step.seconds - 1
    return grown >= PAYS * (after.step.num_gpus / before.step.num_gpus - 1)


def _point(recipe: Recipe, base: Forecast, count: int) -> Point:
    try:
        strong = at_scale(base, count)
        weak = at_scale(base, count, weak=True)
    except UserError as error:
        return Point(count, note=str(error).partition(": ")[2].partition(";")[0])
    grown = (
        f"grpo.num_prompts_per_step={weak.work.num_samples // weak.work.group_size}",
        f"policy.train_global_batch_size={weak.work.num_samples // weak.work.num_updates}",
    )
    best_strong = best_layouts(recipe, strong, number=1)
    best_weak = best_layouts(recipe, weak, number=1, further=grown)
    if not best_strong or not best_weak:
        return Point(count, note="no layout fits")
    fits = accepted(recipe, [strong.setup], base.scenario.shape, base.scenario.hardware, 1)
    return Point(
        count,
        own=strong if next(fits, None) else None,
        strong=best_strong[0].forecast,
        weak=best_weak[0].forecast,
        strong_overrides=best_strong[0].overrides,
        weak_overrides=best_weak[0].overrides,
    )


def own_layout(points: Sequence[Point]) -> str:
    """Say at how many GPUs the recipe's own layout stops paying."""
    before: Forecast | None = None
    for point in points:
        if point.strong is None:
            continue
        count, instead = point.num_gpus, f"{point.strong.step.seconds:.0f} s with the best one"
        if before and point.own is None:
            return f"the recipe's own layout does not divide or fit {count} GPUs, {instead}"
        if before and point.own and not _pays(before, point.own):
            seconds = f"{point.own.step.seconds:.0f} s per step"
            return f"the recipe's own layout stops paying at {count} GPUs: {seconds}, {instead}"
        before = point.own
    rest = "pays on all of these GPUs" if before else "does not divide or fit any of these GPUs"
    return f"the recipe's own layout {rest}"


def draw_scaling(points: Sequence[Point], file: Path, title: str) -> None:
    """Plot step time, efficiency and GPU-hours against GPUs, as a PNG."""
    from nemo_grpo.support import pictures as look

    drawn = [(point, point.strong, point.weak) for point in points if point.strong and point.weak]
    gpus = [point.num_gpus for point, _, _ in drawn]
    figure = look.new_figure(11, 3.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=look.INK)
    panels = {
        "seconds per step": [(strong.step.seconds, weak.step.seconds) for _, strong, weak in drawn],
        "tokens/s/GPU, relative": [(p.strong_efficiency, p.weak_efficiency) for p, _, _ in drawn],
        "GPU-hours of the run": [(strong.gpu_hours, weak.gpu_hours) for _, strong, weak in drawn],
    }
    for axes, (name, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        lines = {"same batch": [strong for strong, _ in values], "batch grows": [weak for _, weak in values]}
        for (label, line), color, dash, marker in zip(
            lines.items(), look.COLORS, look.DASHES, "os", strict=False
        ):
            axes.plot(gpus, line, color=color, ls=dash, marker=marker, ms=4.5, lw=1.9, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("GPUs", fontsize=9, color=look.INK)
        look.set_title(axes, name)
        look.tidy(axes)
    own = [(point.num_gpus, point.own.step.seconds) for point in points if point.own]
    steps = figure.axes[0]
    label = "recipe's own layout"
    steps.plot(
        [n for n, _ in own], [s for _, s in own], color=look.COMPANION, ls=look.DASHES[2], lw=1.3, label=label
    )
    steps.legend(frameon=False, fontsize=8.5, handlelength=3)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
    look.write_png(figure, file, dpi=130)
