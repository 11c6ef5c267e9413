"""The picture of a paired comparison: each setting's difference to the baseline, with its interval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_grpo.diagnostics.paired import FINAL, SAME_ROLLOUTS, Difference, Paired
from nemo_grpo.pictures import COLORS, COMPANION, INK, new_figure, set_title, tidy, write_png

FOREST = "forest.png"
SHOWN = {
    FINAL: ("after the same steps", COLORS[0], "o", 0.13),
    SAME_ROLLOUTS: ("after the same rollouts", COLORS[1], "s", -0.13),
}
"""Figure -> name, colour, marker, and height above the row's middle."""


def draw_forest(paired: Sequence[Paired], baseline: str, path: Path) -> None:
    """Write the picture: a row per setting, the baseline a line at 0; filled marks exclude 0.

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
            fill = color if _excludes_zero(found) else "white"
            axes.plot(found.mean, height - row, marker=marker, ms=6, color=color, mfc=fill, ls="")
        if there:
            axes.plot([], [], color=color, marker=marker, ms=6, mfc="white", lw=1.8, label=label)
    axes.set_yticks([-row for row in range(len(paired))], [_row_name(one) for one in paired])
    axes.set_ylim(0.6 - len(paired), 0.6)
    label = "difference in held-out accuracy,\nmean and 95 % interval over paired seeds; filled: excludes 0"
    axes.set_xlabel(label, fontsize=9, color=INK)
    set_title(axes, f"Against {baseline}")
    if axes.get_legend_handles_labels()[0]:
        place: Any = "outside lower center"
        figure.legend(loc=place, ncols=2, frameon=False, fontsize=8.5)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    write_png(figure, path, dpi=200)


def _excludes_zero(found: Difference) -> bool:
    return found.interval is not None and not found.interval[0] <= 0 <= found.interval[1]


def _row_name(one: Paired) -> str:
    return f"{one.label} (n={max((len(found.by_seed) for found in one.differences.values()), default=0)})"
