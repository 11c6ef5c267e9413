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
    eff, found = _efficiency(vector), []
    for row in rows:
        seconds = predicted(row.predict(eff))
        found += [math.log(seconds[name] / row.published[name]) / NOISE for name in row.fits]
    scales = np.array([TIGHT.get(name, LOOSE) for name in NAMES])
    return np.array([*found, *(vector - _vector(PRIOR)) / scales])


def fit(rows: Sequence[Row]) -> Efficiency:
    """Fit by Gauss-Newton on the constants' logarithms, with shorter steps while they do not help."""
    vector = _vector(PRIOR)
    target = partial(residuals, rows)
    best = target(vector)
    for _ in range(12):
        base, columns = best, []
        for index in range(len(NAMES)):
            moved = vector.copy()
            moved[index] += 1e-3
            columns.append((target(moved) - base) / 1e-3)
        jacobian = np.stack(columns, 1)
        step = np.linalg.lstsq(jacobian, -base, rcond=None)[0]
        for scale in (1.0, 0.5, 0.25, 0.1, 0.02):
            trial = target(vector + scale * step)
            if trial @ trial < best @ best - 1e-9:
                vector, best = vector + scale * step, trial
                break
        else:
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
        step, host = row.predict(FITTED), row.source.partition(" ")[0]
        for what, seconds in row.published.items():
            found = error(row, step, what)
            errors.setdefault(f"{host}, {row.gpu}, {what}", []).append(found)
            cells = (row.source, row.gpu, row.name, what, f"{seconds:g}", f"{predicted(step)[what]:.3g}")
            print(f"| {' | '.join(cells)} | {found:+.0%} |")
    print("\nMedian and worst error:\n")
    for name, each in errors.items():
        sizes = [abs(error) for error in each]
        print(f"- {name}: {len(each)} rows, {median(sizes):.0%}, {max(sizes):.0%}{_held(name, each)}")
    print("\nAssumed where a source is silent:\n")
    for note in dict.fromkeys(f"- {row.source}: {row.note}" for row in rows if row.note):
        print(note)
    print("\nNot predicted, for what the source does not state:\n")
    for of, lacks in lacking:
        print(f"- {of['source']}, {of.get('model', '?')}, {of.get('mode', '?')}: {lacks}")


def _held(name: str, errors: Sequence[float]) -> str:
    """Count the steps in the interval that `nemo-grpo plan` prints, if their GPU has one of its own."""
    _, gpu, what = name.split(", ")
    if what != "step" or gpu not in PUBLISHED:
        return ""
    low, high = PUBLISHED[gpu].around(1.0)
    return f"; {sum(low <= 1 / (1 + error) <= high for error in errors)} within {low:g} to {high:g}"


def seen_of(what: str, ratios: Mapping[str, Sequence[float]]) -> PredictionError:
    """Compute errors of predictions, and the interval that follows from them.

    The ends are the k-th smallest and the k-th largest of published / predicted. k is the largest for which
    at least `COVERAGE` of the steps lie between the ends given by the other models' steps, because a recipe's
    model is new too; 1 if there is none.

    Args: what: the steps, for a sentence.  ratios: model -> published / predicted of its steps; at least two.
    """
    found = sorted(ratio for group in ratios.values() for ratio in group)
    fewest = min(len(found) - len(group) for group in ratios.values())
    enough = takewhile(lambda k: _covered(ratios, k) >= COVERAGE, range(1, (fewest + 1) // 2 + 1))
    rank = max(enough, default=1)
    errors = [abs(1 / ratio - 1) for ratio in found]
    low, high = found[rank - 1], found[-rank]
    return PredictionError(what, len(found), median(errors), max(errors), low, high, _covered(ratios, rank))


def _covered(ratios: Mapping[str, Sequence[float]], rank: int) -> float:
    inside = total = 0
    for model, group in ratios.items():
        others = sorted(ratio for name, other in ratios.items() if name != model for ratio in other)
        inside += sum(others[rank - 1] <= ratio <= others[-rank] for ratio in group)
        total += len(group)
    return inside / total


def seen_by_gpu(rows: Sequence[Row]) -> dict[str, PredictionError]:
    """Compute errors per GPU and for all together, each model predicted without itself."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for model in dict.fromkeys(row.model for row in rows):
        eff = fitted_without(rows, model)
        for row in (row for row in rows if row.model == model):
            ratio = 1 / (1 + error(row, row.predict(eff)))
            for gpu in (row.gpu, "other"):
                ratios.setdefault(gpu, {}).setdefault(model, []).append(ratio)
    return {gpu: seen_of(gpu, found) for gpu, found in ratios.items()}


def table(rows: Sequence[Row]) -> None:
    """Print each row predicted by constants that were fitted without its model."""
    without = {model: fitted_without(rows, model) for model in dict.fromkeys(row.model for row in rows)}
    errors: dict[str, list[float]] = {}
    print("| GPU | row | source | s | predicted | error | tokens/s/GPU | predicted | fitted on all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        step, whole = row.predict(without[row.model]), row.predict(FITTED)
        errors.setdefault(row.gpu, []).append(abs(error(row, step)))
        tokens = f"{row.tokens:g}" if row.tokens else "-"
        print(
            f"| {row.gpu} | {row.name} | {row.source} | {row.published['step']:g} | {step.seconds:.0f} | "
            f"{error(row, step):+.0%} | {tokens} | {step.tokens_per_second_per_gpu:.3g} | "
            f"{error(row, whole):+.0%} |"
        )
    print()
    for gpu, found in errors.items():
        print(f"{gpu}: {len(found)} rows, median error {median(found):.0%}, worst {max(found):.0%}")


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
        for gpu, found in seen_by_gpu(read_rows()).items():
            what, *values = vars(found).values()
            print(f"{gpu}: PredictionError({what!r}, {', '.join(f'{value:.3g}' for value in values)})")
    else:
        table(read_rows())


if __name__ == "__main__":
    main()
