"""What more GPUs buy: strong and weak scaling of one layout, and the picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoints_conv.families import ModelSpec
from nemo_grpo.errors import UserError
from nemo_grpo.plan.forecast import Forecast, at_scale
from nemo_grpo.plan.hardware import Hardware

PAYS = 0.5
"""More GPUs pay while they bring at least this share of the speed that they would bring at best."""


@dataclass(frozen=True)
class Point:
    """One number of GPUs.

    Attributes: strong, weak: same batch, and a batch that grows; None: the layout does not divide the GPUs.
                strong_efficiency, weak_efficiency: tokens/s/GPU over that of the first number that divides.
                note: that more GPUs have stopped to pay, or what does not divide.
    """

    num_gpus: int
    strong: Forecast | None = None
    weak: Forecast | None = None
    strong_efficiency: float = 0.0
    weak_efficiency: float = 0.0
    note: str = ""


def scaling(base: Forecast, shape: ModelSpec, hardware: Hardware, counts: Sequence[int]) -> list[Point]:
    """The layout at each number of GPUs, ascending.

    Raises: UserError: a number below 1, or none that the layout divides.
    """
    if not counts or min(counts) < 1:
        raise UserError(f"--scale {','.join(map(str, counts))}: numbers of GPUs, such as 8,64,512")
    points: list[Point] = []
    first: tuple[float, float] | None = None
    last: Point | None = None
    for count in sorted(set(counts)):
        try:
            strong = at_scale(base, shape, hardware, count)
            weak = at_scale(base, shape, hardware, count, weak=True)
        except UserError as error:
            points.append(Point(count, note=str(error).partition(": ")[2].partition(";")[0]))
            continue
        speeds = strong.step.tokens_per_second_per_gpu, weak.step.tokens_per_second_per_gpu
        first = first or speeds
        point = Point(count, strong, weak, speeds[0] / first[0], speeds[1] / first[1])
        if last is not None and last.strong is not None:
            grown = last.strong.step.seconds / strong.step.seconds - 1
            if grown < PAYS * (count / last.num_gpus - 1):
                point = replace(point, note="does not pay with this batch")
        points.append(point)
        last = point
    if first is None:
        raise UserError(f"--scale {','.join(map(str, counts))}: {points[0].note}; use multiples")
    return points


def draw_scaling(points: Sequence[Point], file: Path, title: str) -> None:
    """Step time, efficiency and GPU-hours against GPUs, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(point, point.strong, point.weak) for point in points if point.strong and point.weak]
    gpus = [point.num_gpus for point, _, _ in drawn]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = {
        "seconds per step": [(strong.step.seconds, weak.step.seconds) for _, strong, weak in drawn],
        "tokens/s/GPU, relative": [(p.strong_efficiency, p.weak_efficiency) for p, _, _ in drawn],
        "GPU-hours of the run": [(strong.gpu_hours, weak.gpu_hours) for _, strong, weak in drawn],
    }
    for axes, (name, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.plot(gpus, [strong for strong, _ in values], "o-", color="#0072B2", label="same batch")
        axes.plot(gpus, [weak for _, weak in values], "s--", color="#D55E00", label="batch grows")
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs")
        axes.set_title(name)
        axes.grid(color="#e4e4e4")
    figure.axes[0].legend(frameon=False)
    figure.savefig(file, dpi=110)
