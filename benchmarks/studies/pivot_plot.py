"""The picture of a perturbation study: entropy along one response, accuracy with tokens kept and replaced."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from nemo_grpo.support.pictures import COLORS, INK, new_figure, set_title, tidy, write_png

KINDS = {"pivot": "highest entropy", "random": "random", "calm": "lowest entropy"}
MAX_TOKENS_SHOWN = 60


def draw_pivots(study: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a study's JSON object (ERPO Figure 1 a and b)."""
    figure = new_figure(11.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _draw_response(left, study)
    _draw_accuracies(right, study)
    write_png(figure, path, dpi=130)


def _draw_response(axes: Axes, study: Mapping[str, Any]) -> None:
    """Entropy of each token of the first response, pivots marked."""
    response = study["responses"][0]
    tokens, entropies = response["tokens"][:MAX_TOKENS_SHOWN], response["entropies"][:MAX_TOKENS_SHOWN]
    chosen = {
        position
        for point in study["points"]
        if point["problem"] == response["problem"] and point["kind"] == "pivot"
        for position in point["positions"]
    }
    colors = [COLORS[1] if i in chosen else COLORS[4] for i in range(len(tokens))]
    axes.bar(range(len(tokens)), entropies, color=colors, width=0.8)
    tidy(axes)
    size = 8 if len(tokens) <= 30 else 5.5
    labels = [repr(token)[1:-1].replace("$", r"\$") for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=size)
    set_title(axes, "Entropy along a response, pivots in red")
    axes.set_ylabel("nats", fontsize=9, color=INK)


def _draw_accuracies(axes: Axes, study: Mapping[str, Any]) -> None:
    """Accuracy after each kind of position, with one standard error over responses."""
    for offset, what, color in ((-0.19, "kept", COLORS[5]), (0.19, "replaced", COLORS[1])):
        values = [study["summary"][kind][what] for kind in KINDS]
        errors = [study["summary"][kind][f"{what}_stderr"] for kind in KINDS]
        places = [i + offset for i in range(len(KINDS))]
        axes.bar(places, values, yerr=errors, width=0.36, color=color, label=f"token {what}", capsize=3)
    axes.set_xticks(range(len(KINDS)), list(KINDS.values()), fontsize=9)
    axes.set_ylim(0, 1.05)
    set_title(axes, "Accuracy of the continuations")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper right")
    tidy(axes)
