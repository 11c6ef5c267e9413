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
    """Average a list of numbers, element by element, over each run's measured steps and then over the runs.

    Args:
        part: key of a measured step, such as ``covariance``.
        name: name of the list in that part.
        shares: name of the part's list of token shares. Give it if each number is a mean over tokens: then
            steps are weighted by their tokens, and numbers without a token are masked.

    Returns:
        Mean and sample standard deviation over the runs (0 for one run); None if no run has the list.
    """
    means = []
    for run in group.runs:
        measured_steps = [step for step in run.diagnostics if name in step.get(part, {})]
        if not measured_steps:
            continue
        numbers = [step[part][name] for step in measured_steps]
        num_tokens = None
        if shares:
            num_tokens = [step["num_tokens"] * np.array(step[part][shares]) for step in measured_steps]
        # Masked, because the weights of a bin without tokens are all 0, for which numpy's average raises.
        means.append(np.ma.average(numbers, axis=0, weights=num_tokens))
    if not means:
        return None
    stacked = np.ma.stack(means)
    spread = stacked.std(axis=0, ddof=1) if len(means) > 1 else np.zeros_like(means[0])
    return stacked.mean(axis=0), spread


def draw_cumulative(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw which share of the total the largest tokens make up, over their share of all tokens."""
    part, name = keys
    for index, group in enumerate(groups):
        cumulative = group_mean(group, part, name)
        shares = group_mean(group, part, "share")
        if cumulative is not None and shares is not None:
            mean, spread = cumulative
            percent_of_tokens = 100 * shares[0]
            _line(axes, percent_of_tokens, mean, spread, index, len(groups))
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    return ""


def draw_bins(axes: Axes, groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Draw one value per bin of the token's probability, at the bin's middle.

    Args:
        keys: arguments ``part``, ``name`` and, for means over tokens, ``shares`` of `group_mean`.
    """
    for index, group in enumerate(groups):
        bins = group_mean(group, *keys)
        if bins is not None:
            mean, spread = bins
            middle = (np.arange(len(mean)) + 0.5) / len(mean)
            _line(axes, middle, mean, spread, index, len(groups))
    return ""


def _line(axes: Axes, x: Any, mean: np.ndarray, spread: np.ndarray, index: int, num_groups: int) -> None:
    style = style_of(index)
    axes.plot(x, mean, color=style.color, ls=style.dash, marker=style.marker, ms=3.5, lw=1.6)
    if spread.any() and num_groups <= MAX_BANDS:
        axes.fill_between(x, mean - spread, mean + spread, color=style.color, alpha=0.14, lw=0)


def covariance_rows(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of CW-GRPO's Table 1, averaged over steps and seeds.

    A group has two rows, for its positive and its negative covariances.
    """
    share_heads: list[str] = []
    rows = []
    for group in groups:
        shares = group_mean(group, "covariance", "share")
        if shares is None:
            continue
        share_heads = [f"{100 * share:g} %" for share in shares[0]]
        for sign in ("positive", "negative"):
            covariances = group_mean(group, "covariance", sign)
            assert covariances is not None
            cells = [f"{value:.2f}" for value in covariances[0]]
            rows.append([group.label, sign, *cells])
    return ["setting", "covariance", *share_heads], rows


def gradient_rows(groups: Sequence[RunGroup]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows that show how even the gradient norm is (TR-GRPO Figure 3), mean over seeds."""
    rows = []
    for group in groups:
        # A run of one step has no spread.
        curves = [np.array(curve) for curve in group.values("grad_norm") if len(curve) > 1]
        if curves:
            numbers = np.mean([gradient_spread(norms) for norms in curves], axis=0)
            cells = [f"{value:.3g}" for value in numbers]
            rows.append([group.label, *cells])
    return ["setting", "mean", "std", "std / mean", "largest / median", "spikes per 100 steps"], rows


def gradient_spread(norms: np.ndarray) -> tuple[float, float, float, float, float]:
    """Compute mean, std (ddof 0), std / mean, largest / median, and % of steps above three medians."""
    mean = float(norms.mean())
    median = float(np.median(norms))
    deviation = float(norms.std())
    # If most steps of a run have no signal, and so no gradient, the ratios are undefined.
    if mean == 0 or median == 0:
        return mean, deviation, 0.0, 0.0, 0.0
    spikes_per_100_steps = 100 * (norms > 3 * median).mean()
    return mean, deviation, deviation / mean, float(norms.max()) / median, float(spikes_per_100_steps)


def token_rows(groups: Sequence[RunGroup], name: str) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of one of `tokens.token_tables`.

    A group shows the last measured step of its first run.
    """
    head = ["rank"]
    tables = []
    for group in groups[:MAX_LISTED]:
        last_steps = [run.diagnostics[-1] for run in group.runs if run.diagnostics]
        if not last_steps:
            continue
        measured = last_steps[0]
        head += [f"{group.label}, step {measured['step']}", "count", "probability", "share"]
        table = []
        for token, count, probability, share in measured["tokens"][name]:
            table.append([repr(token), str(count), f"{probability:.3f}", f"{share:.4f}"])
        tables.append(table)
    rows = []
    for rank in range(max(map(len, tables), default=0)):
        row = [str(rank + 1)]
        for table in tables:
            row += table[rank] if rank < len(table) else ["", "", "", ""]
        rows.append(row)
    return head, rows
