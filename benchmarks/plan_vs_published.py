"""The planner's step times against published ones, each model predicted by constants fitted without it.

    python benchmarks/plan_vs_published.py             # every row of benchmarks/published/nemo_rl.yaml
    python benchmarks/plan_vs_published.py --fit       # the constants of nemo_grpo/plan/efficiency.py

A fit minimizes the squared logarithm of predicted / published over H100 rows and published phases, and keeps
the constants near values that are usual for kernels of their kind (`PRIOR`, with `LOOSE` as the standard
deviation of a constant's logarithm), so that a constant that only one model shows stays usual without it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from nemo_grpo.plan.efficiency import FITTED, Efficiency
from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.lengths import of_mean
from nemo_grpo.plan.presets import PRESETS
from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.step_time import ROLLOUT, UPDATE, StepTime, step_time
from nemo_grpo.plan.workload import Workload
from nemo_grpo.recipe.layout import Layout

FILE = Path(__file__).parent / "published" / "nemo_rl.yaml"
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
"""Fractions of a peak that are well known."""
NOISE = 0.1
"""Standard deviation of the logarithm of a published time."""


@dataclass(frozen=True)
class Row:
    """One published step."""

    name: str
    model: str
    gpu: str
    source: str
    setup: Setup
    work: Workload
    seconds: float
    tokens: float | None
    phases: Mapping[str, float]
    fits: Sequence[str]

    def predict(self, eff: Efficiency) -> StepTime:
        """The planner's step."""
        return step_time(PRESETS[self.model], self.setup, self.work, HARDWARE[self.gpu], eff)


def read_rows() -> list[Row]:
    """All rows that state what a prediction needs."""
    tree = yaml.safe_load(FILE.read_text())
    return [_row(tree["layouts"][row["layout"]] | row, tree["prompt"]) for row in tree["rows"]]


def _row(row: dict[str, Any], prompt: int) -> Row:
    get = row.get
    per_node = min(HARDWARE[row["gpu"]].nvlink_domain, 8) if row["gpu"] == "h100" else 4
    first, last = get("ends", [None, None])
    tp = get("tp", 1)
    samples, limit = row["prompts"] * row["group"], row["limit"]
    fp8 = get("fp8", False)
    policy = f"{row['ahead']} ahead" if get("ahead") else "in turn"
    setup = Setup(
        layout=Layout(tp, get("pp", 1), get("cp", 1), get("ep", 1), 1, tp > 1, first, last),
        num_nodes=row["gpus"] // per_node,
        gpus_per_node=per_node,
        num_rollout_gpus=get("rollout", 0),
        train_tokens=limit,
        score_tokens=limit * get("score", 1),
        num_microbatches=1,
        max_length=limit,
        recompute=("full",) if get("recompute") else (),
        grad_bytes=2,
        optimizer="adam",
        distributed_optimizer=True,
        precision_aware=True,
        offload_fraction=0.0,
        lora_dim=0,
        lora_modules=(),
        fp8_training=fp8,
        fp8_recipe="blockwise" if fp8 else "",
        logprob_chunk=0,
        vllm_tensor=row["vllm"],
        vllm_pipeline=1,
        vllm_fp8=fp8,
        vllm_cache_bytes=2,
        vllm_share=get("share", 0.6),
        has_rollouts=True,
        vllm_max_sequences=get("sequences", 1024),
        packed=not get("padded"),
    )
    work = Workload(
        num_samples=samples,
        group_size=row["group"],
        num_updates=samples // row["batch"],
        lengths=of_mean(row["length"], limit - prompt, prompt),
        scoring_passes=2,
        trajectory_age=get("ahead", 0),
    )
    name = f"{row['model'].split('/')[1]} {row['gpus']} {policy}{' FP8' if fp8 else ''}"
    return Row(
        name,
        row["model"],
        row["gpu"],
        row["source"],
        setup,
        work,
        row["seconds"],
        get("tokens"),
        get("phases", {}),
        get("fits", ["step", *get("phases", {})]),
    )


def phase_seconds(step: StepTime) -> dict[str, float]:
    """The phases as NeMo-RL's timers name them: swaps belong to scoring and refit."""
    p = step.phases
    return {
        "rollout": sum(p[name] for name in ROLLOUT),
        "update": sum(p[name] for name in UPDATE),
        "scoring": p["scoring"],
        "refit": p["refit"],
    }


NAMES = tuple(field.name for field in fields(Efficiency))


def _vector(eff: Efficiency) -> np.ndarray:
    return np.log([getattr(eff, name) for name in NAMES])


def _efficiency(vector: np.ndarray) -> Efficiency:
    return Efficiency(**{name: float(value) for name, value in zip(NAMES, np.exp(vector), strict=True)})


def residuals(rows: Sequence[Row], vector: np.ndarray) -> np.ndarray:
    """Logarithms of predicted / published in standard deviations, and the constants' distance from PRIOR."""
    eff, found = _efficiency(vector), []
    for row in rows:
        step = row.predict(eff)
        predicted = {"step": step.seconds} | phase_seconds(step)
        published = {"step": row.seconds} | row.phases
        found += [math.log(predicted[name] / published[name]) / NOISE for name in row.fits]
    scales = np.array([TIGHT.get(name, LOOSE) for name in NAMES])
    return np.array([*found, *(vector - _vector(PRIOR)) / scales])


def fit(rows: Sequence[Row]) -> Efficiency:
    """Gauss-Newton on the constants' logarithms, with shorter steps while they do not help."""
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
    """Constants from the H100 rows of all models but one, or of all."""
    return fit([row for row in rows if row.gpu == "h100" and row.model != model])


def error(row: Row, step: StepTime) -> float:
    """Predicted over published, less one."""
    return step.seconds / row.seconds - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the constants")
    parser.add_argument("--phases", action="store_true", help="print predicted phases too")
    options = parser.parse_args()
    rows = read_rows()
    if options.fit:
        for name, value in vars(fitted_without(rows, None)).items():
            print(f"    {name}: float = {value:.3g}")
        return
    without = {model: fitted_without(rows, model) for model in dict.fromkeys(row.model for row in rows)}
    errors: dict[str, list[float]] = {}
    print("| GPU | row | source | s | predicted | error | tokens/s/GPU | predicted | fitted on all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        step, whole = row.predict(without[row.model]), row.predict(FITTED)
        errors.setdefault(row.gpu, []).append(abs(error(row, step)))
        tokens = f"{row.tokens:g}" if row.tokens else "-"
        print(
            f"| {row.gpu} | {row.name} | {row.source} | {row.seconds:g} | {step.seconds:.0f} | "
            f"{error(row, step):+.0%} | {tokens} | {step.tokens_per_second_per_gpu:.3g} | "
            f"{error(row, whole):+.0%} |"
        )
        if options.phases:
            print("   ", {k: round(v, 1) for k, v in step.phases.items()}, dict(row.phases))
    print()
    for gpu, found in errors.items():
        print(f"{gpu}: {len(found)} rows, median error {median(found):.0%}, worst {max(found):.0%}")


if __name__ == "__main__":
    main()
