"""Plots and tables of diagnostics.jsonl: covariance, gradient by probability, extreme tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from nemo_grpo.report.plots import MAX_BANDS, style_of
from nemo_grpo.report.runs import RunGroup

MAX_LISTED = 4
"""Most groups in a table of tokens."""


def group_mean(
    group: RunGroup, part: str, name: str, shares: str = ""
) -> tuple[np.ndarray, np.ndarray] | None:
    """Average a list of numbers over each run's measured steps, then over the runs.

    Args:    shares: the part's list of token shares, if each number is a mean over tokens; steps are then
             weighted by their tokens, and numbers without a token are masked.
    Returns: mean and sample standard deviation over the runs (0 for one run); None if no run has the list.
    """
    means = []
    for run in group.runs:
        if looks := [look for look in run.diagnostics if name in look.get(part, {})]:
            numbers = [look[part][name] for look in looks]
            tokens = [look["num_tokens"] * np.array(look[part][shares]) for look in looks] if shares else None
            means.append(np.ma.average(numbers, axis=0, weights=tokens))
    if not means:
        return None
    stacked = np.ma.stack(means)
    spread = stacked.std(axis=0, ddof=1) if len(means) > 1 else np.zeros_like(means[0])
    return stacked.mean(axis=0), spread


def draw_cumulative(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw the share of the total over the share of tokens that make it up, largest first."""
    part, name = keys
    for index, group in enumerate(groups):
        found, shares = group_mean(group, part, name), group_mean(group, part, "share")
        if found is not None and shares is not None:
            _line(axes, 100 * shares[0], *found, index, len(groups))
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    return ""


def draw_bins(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw one value per bin of the token's probability, at the bin's middle.

    Args: keys: part, name, and for a mean over tokens the list of their shares.
    """
    for index, group in enumerate(groups):
        if (found := group_mean(group, *keys)) is not None:
            middle = (np.arange(len(found[0])) + 0.5) / len(found[0])
            _line(axes, middle, *found, index, len(groups))
    return ""


def _line(axes: Axes, x: Any, mean: np.ndarray, spread: np.ndarray, index: int, num_groups: int) -> None:
    style = style_of(index)
    axes.plot(x, mean, color=style.color, ls=style.dash, marker=style.marker, ms=3.5, lw=1.6)
    if spread.any() and num_groups <= MAX_BANDS:
        axes.fill_between(x, mean - spread, mean + spread, color=style.color, alpha=0.14, lw=0)


def covariance_rows(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Make CW-GRPO Table 1, mean over steps and seeds: a row per group and sign."""
    head, rows = ["setting", "covariance"], []
    for group in groups:
        shares = group_mean(group, "covariance", "share")
        if shares is None:
            continue
        head[2:] = [f"{100 * share:g} %" for share in shares[0]]
        for sign in ("positive", "negative"):
            found = group_mean(group, "covariance", sign)
            assert found is not None
            rows.append([group.label, sign, *(f"{value:.2f}" for value in found[0])])
    return head, rows


def gradient_rows(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Measure how even the gradient norm is (TR-GRPO Figure 3), mean over seeds: a row per group."""
    rows = []
    for group in groups:
        curves = [list(run.points("grad_norm").values()) for run in group.runs]
        if norms := [np.array(curve) for curve in curves if len(curve) > 1]:
            numbers = np.mean([gradient_spread(norm) for norm in norms], axis=0)
            rows.append([group.label, *(f"{value:.3g}" for value in numbers)])
    return ["setting", "mean", "std", "std / mean", "largest / median", "spikes per 100 steps"], rows


def gradient_spread(norms: np.ndarray) -> tuple[float, float, float, float, float]:
    """Compute mean, std (ddof 0), std / mean, largest / median, and % of steps above three medians."""
    mean, median = norms.mean(), np.median(norms)
    if mean == 0 or median == 0:
        return float(mean), float(norms.std()), 0.0, 0.0, 0.0
    return (
        float(mean),
        float(norms.std()),
        float(norms.std() / mean),
        float(norms.max() / median),
        float(100 * (norms > 3 * median).mean()),
    )


def token_rows(groups: Sequence[RunGroup], name: str) -> tuple[list[str], list[list[str]]]:
    """Lay out one of `tokens.token_tables` at the last measured step of each group's first run."""
    head, columns = ["rank"], []
    for group in groups[:MAX_LISTED]:
        look = next((run.diagnostics[-1] for run in group.runs if run.diagnostics), None)
        if look is None:
            continue
        head += [f"{group.label}, step {look['step']}", "count", "probability", "share"]
        columns.append(
            [[repr(text), str(n), f"{p:.3f}", f"{s:.4f}"] for text, n, p, s in look["tokens"][name]]
        )
    rows = []
    for rank in range(max(map(len, columns), default=0)):
        cells = [column[rank] if rank < len(column) else [""] * 4 for column in columns]
        rows.append([str(rank + 1), *(cell for four in cells for cell in four)])
    return head, rows
