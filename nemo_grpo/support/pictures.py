"""Style of all plots, and figures without pyplot's global state."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
"""Okabe and Ito's colours for colour-blind readers, with brown for yellow, which is too pale for lines."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX*"
INK = "#333333"
GRID = "#e4e4e4"
COMPANION = "#777777"
"""Colour of reference lines and of curves that accompany another one."""


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def write_png(figure: Figure, path: Path, dpi: int) -> None:
    """Save a figure as PNG, without `Figure.savefig`, which draws everything twice, once for the layout."""
    figure.dpi = dpi
    FigureCanvasAgg(figure).print_png(path)


def set_title(axes: Axes, text: str, pad: float = 6) -> None:
    """Write a bold title above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=pad)


def tidy(axes: Axes) -> None:
    """Draw a pale grid and only the left and bottom sides. The size of the tick labels is set, too."""
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
