"""The planner's step times against published ones, each model predicted by constants fitted without it.

    python -m benchmarks.plan_vs_published           # every row of published/nemo_rl.yaml
    python -m benchmarks.plan_vs_published --fit     # constants of nemo_grpo/plan/hardware.py
    python -m benchmarks.plan_vs_published --errors  # intervals of nemo_grpo/plan/hardware.py
    python -m benchmarks.plan_vs_published --blind FILE   # a CSV of published/; never fitted

A fit minimizes the squared logarithm of predicted / published over H100 rows and published phases, and keeps
the constants near values that are usual for kernels of their kind (`PRIOR`, with `LOOSE` as the standard
deviation of a constant's logarithm), so that a constant that only one model shows stays usual without it.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.published_rows import Row, error, predicted, read_blind, read_rows
from nemo_grpo.plan.hardware import FITTED, PUBLISHED, Efficiency, PredictionError

PRIOR = Efficiency(
    matrix=0.5,
    grouped=0.25,
    memory=0.7,
    link=0.5,
    layer=0.3e-3,
    expert_layer=2e-3,
    decode=5e-3,
    hop=20e-6,
    far_hop=120e-6,
    tensor=0.5e-3,
    refit=3.0,
    routes=0.5,
    step=3.0,
    sample=1e-3,
)
LOOSE = 0.5
TIGHT = {"matrix": 0.2, "memory": 0.15, "link": 0.3}
"""Standard deviation of constants that are well known."""
NOISE = 0.1
"""Standard deviation of the logarithm of a published time."""
COVERAGE = 0.8
"""Least share of steps that an interval holds."""
NAMES = tuple(field.name for field in fields(Efficiency))


def _vector(eff: Efficiency) -> np.ndarray:
    return np.log([getattr(eff, name) for name in NAMES])


def _efficiency(vector: np.ndarray) -> Efficiency:
    return Efficiency(**{name: float(value) for name, value in zip(NAMES, np.exp(vector), strict=True)})


def residuals(rows: Sequence[Row], vector: np.ndarray) -> np.ndarray:
    """Return log(predicted / published) in standard deviations, and the constants' distance from PRIOR."""
    efficiency = _efficiency(vector)
    time_residuals = []
    for row in rows:
        seconds = predicted(row.predict(efficiency))
        time_residuals += [math.log(seconds[name] / row.published[name]) / NOISE for name in row.fits]
    scales = np.array([TIGHT.get(name, LOOSE) for name in NAMES])
    prior_residuals = (vector - _vector(PRIOR)) / scales
    return np.array([*time_residuals, *prior_residuals])


def fit(rows: Sequence[Row]) -> Efficiency:
    """Fit by Gauss-Newton on the constants' logarithms, with shorter steps while they do not help."""
    vector = _vector(PRIOR)
    target = partial(residuals, rows)
    best = target(vector)
    for _ in range(12):
        # The planner has no derivatives, so they are finite differences.
        columns = []
        for index in range(len(NAMES)):
            moved = vector.copy()
            moved[index] += 1e-3
            columns.append((target(moved) - best) / 1e-3)
        jacobian = np.stack(columns, 1)
        step = np.linalg.lstsq(jacobian, -best, rcond=None)[0]
        for scale in (1.0, 0.5, 0.25, 0.1, 0.02):
            trial = target(vector + scale * step)
            if trial @ trial < best @ best - 1e-9:
                vector = vector + scale * step
                best = trial
                break
        else:
            # Not even the shortest step helps.
            break
        if np.abs(scale * step).max() < 1e-2:
            break
    return _efficiency(vector)


def fitted_without(rows: Sequence[Row], model: str | None) -> Efficiency:
    """Fit on the H100 rows of all models but one, or of all."""
    return fit([row for row in rows if row.gpu == "h100" and row.model != model])


def blind(file: Path) -> None:
    """Predict a CSV's rows by the shipped constants, and fit nothing."""
    rows, lacking = read_blind(file)
    errors: dict[str, list[float]] = {}
    print("| source | GPU | row | seconds of | published | predicted | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        step = row.predict(FITTED)
        code_base = row.source.partition(" ")[0]
        for phase, seconds in row.published.items():
            phase_error = error(row, step, phase)
            errors.setdefault(f"{code_base}, {row.gpu}, {phase}", []).append(phase_error)
            cells = (row.source, row.gpu, row.name, phase, f"{seconds:g}", f"{predicted(step)[phase]:.3g}")
            print(f"| {' | '.join(cells)} | {phase_error:+.0%} |")
    print("\nMedian and worst error:\n")
    for name, group_errors in errors.items():
        sizes = [abs(error) for error in group_errors]
        coverage = _interval_count(name, group_errors)
        print(f"- {name}: {len(sizes)} rows, {median(sizes):.0%}, {max(sizes):.0%}{coverage}")
    print("\nAssumed where a source is silent:\n")
    for note in dict.fromkeys(f"- {row.source}: {row.note}" for row in rows if row.note):
        print(note)
    print("\nNot predicted, for what the source does not state:\n")
    for row_keys, reasons in lacking:
        print(f"- {row_keys['source']}, {row_keys.get('model', '?')}, {row_keys.get('mode', '?')}: {reasons}")


def _interval_count(name: str, errors: Sequence[float]) -> str:
    """Count the steps in the interval that `nemo-grpo plan` prints, if their GPU has one of its own."""
    _, gpu, phase = name.split(", ")
    if phase != "step" or gpu not in PUBLISHED:
        return ""
    low, high = PUBLISHED[gpu].around(1.0)
    num_within = sum(low <= 1 / (1 + error) <= high for error in errors)
    return f"; {num_within} within {low:g} to {high:g}"


def seen_of(what: str, ratios: Mapping[str, Sequence[float]]) -> PredictionError:
    """Compute errors of predictions, and the interval that follows from them.

    The ends are the k-th smallest and the k-th largest of published / predicted. k is as large as possible
    while at least `COVERAGE` of the steps lie in the interval that the other models' steps give. A step is
    judged by other models, because a recipe's model is new, too. k is 1 if no k covers so many.

    Args:
        what: name of the steps, for a sentence.
        ratios: model -> published / predicted of its steps; at least two models.
    """
    all_ratios = sorted(ratio for group in ratios.values() for ratio in group)
    # The fewest steps that remain without one of the models; k may go up to their middle.
    fewest_other_steps = min(len(all_ratios) - len(group) for group in ratios.values())
    ranks = range(1, (fewest_other_steps + 1) // 2 + 1)
    sufficient_ranks = takewhile(lambda rank: _coverage(ratios, rank) >= COVERAGE, ranks)
    rank = max(sufficient_ranks, default=1)
    errors = [abs(1 / ratio - 1) for ratio in all_ratios]
    low = all_ratios[rank - 1]
    high = all_ratios[-rank]
    coverage = _coverage(ratios, rank)
    return PredictionError(what, len(all_ratios), median(errors), max(errors), low, high, coverage)


def _coverage(ratios: Mapping[str, Sequence[float]], rank: int) -> float:
    """Return the share of steps between the ranks of the other models' steps."""
    num_inside = 0
    num_steps = 0
    for model, group in ratios.items():
        other_ratios = []
        for other_model, other_group in ratios.items():
            if other_model != model:
                other_ratios += other_group
        other_ratios.sort()
        num_inside += sum(other_ratios[rank - 1] <= ratio <= other_ratios[-rank] for ratio in group)
        num_steps += len(group)
    return num_inside / num_steps


def seen_by_gpu(rows: Sequence[Row]) -> dict[str, PredictionError]:
    """Compute errors per GPU and for all together, each model predicted without itself."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for model in dict.fromkeys(row.model for row in rows):
        efficiency = fitted_without(rows, model)
        for row in rows:
            if row.model != model:
                continue
            ratio = 1 / (1 + error(row, row.predict(efficiency)))
            for gpu in (row.gpu, "other"):
                ratios.setdefault(gpu, {}).setdefault(model, []).append(ratio)
    return {gpu: seen_of(gpu, gpu_ratios) for gpu, gpu_ratios in ratios.items()}


def table(rows: Sequence[Row]) -> None:
    """Print each row predicted by constants that were fitted without its model."""
    without = {model: fitted_without(rows, model) for model in dict.fromkeys(row.model for row in rows)}
    errors: dict[str, list[float]] = {}
    print("| GPU | row | source | s | predicted | error | tokens/s/GPU | predicted | fitted on all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        step = row.predict(without[row.model])
        step_by_all = row.predict(FITTED)
        errors.setdefault(row.gpu, []).append(abs(error(row, step)))
        tokens = f"{row.tokens:g}" if row.tokens else "-"
        print(
            f"| {row.gpu} | {row.name} | {row.source} | {row.published['step']:g} | {step.seconds:.0f} | "
            f"{error(row, step):+.0%} | {tokens} | {step.tokens_per_second_per_gpu:.3g} | "
            f"{error(row, step_by_all):+.0%} |"
        )
    print()
    for gpu, sizes in errors.items():
        print(f"{gpu}: {len(sizes)} rows, median error {median(sizes):.0%}, worst {max(sizes):.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the constants")
    parser.add_argument("--errors", action="store_true", help="print the intervals")
    parser.add_argument("--blind", type=Path, metavar="FILE", help="predict a CSV's rows; fit nothing")
    options = parser.parse_args()
    if options.blind:
        blind(options.blind)
    elif options.fit:
        for name, value in vars(fitted_without(read_rows(), None)).items():
            print(f"    {name}: float = {value:.3g}")
    elif options.errors:
        for gpu, prediction_error in seen_by_gpu(read_rows()).items():
            what, *values = vars(prediction_error).values()
            print(f"{gpu}: PredictionError({what!r}, {', '.join(f'{value:.3g}' for value in values)})")
    else:
        table(read_rows())


if __name__ == "__main__":
    main()
