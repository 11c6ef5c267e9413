"""Distance between two engines' results of the same steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from benchmarks.agreement.recording import StepResult

KL = "kl/reference"


@dataclass(frozen=True)
class Differences:
    """Greatest differences over the steps, in the order of the table's columns.

    Differences of tensors are absolute, over the tokens that count; NaN if an engine has no such tensor.
    Differences of numbers are relative to the greatest number of all steps.

    Attributes:
        advantages: difference of a tensor.
        token_weights: difference of a tensor.
        logprobs: difference of a tensor.
        reference: difference of a tensor, the logprobs of the reference.
        entropies: difference of a tensor.
        loss: difference of a number.
        kl: difference of a number.
        grad_norm: difference of a number.
        first: distance between the engines' weights after the first step, relative to their way so far.
        last: the same after the last step.
    """

    advantages: float
    token_weights: float
    logprobs: float
    reference: float
    entropies: float
    loss: float
    kl: float
    grad_norm: float
    first: float
    last: float


def compare(ours: Sequence[StepResult], theirs: Sequence[StepResult]) -> Differences:
    """Compare a case's steps."""

    steps = list(zip(ours, theirs, strict=True))

    def greatest(name: str) -> float:
        differences = []
        for a, b in steps:
            if name in a.tensors and name in b.tensors:
                # Only the embedded engine's result has the mask.
                mask = a.tensors["mask"].bool()
                difference = (a.tensors[name] - b.tensors[name])[mask]
                differences.append(difference.abs().max().item())
        return max(differences, default=math.nan)

    losses = [pair for a, b in steps for pair in zip(a.losses, b.losses, strict=True)]
    return Differences(
        advantages=greatest("advantages"),
        token_weights=greatest("token_weights"),
        logprobs=greatest("logprobs"),
        reference=greatest("reference"),
        entropies=greatest("entropies"),
        loss=relative(losses),
        kl=relative([(a.metrics.get(KL, 0.0), b.metrics.get(KL, 0.0)) for a, b in steps]),
        grad_norm=relative([(a.grad_norm, b.grad_norm) for a, b in steps]),
        first=way_apart(ours[0].weights, theirs[0].weights, ours[0].start),
        last=way_apart(ours[-1].weights, theirs[-1].weights, ours[0].start),
    )


def relative(pairs: Sequence[tuple[float, float]]) -> float:
    """Compute the greatest difference, relative to the greatest number; 0 if all numbers are 0."""
    greatest_difference = max(abs(a - b) for a, b in pairs)
    greatest_number = max(max(abs(a), abs(b)) for a, b in pairs)
    if greatest_number == 0:
        return 0.0
    return greatest_difference / greatest_number


def way_apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Compute |ours - theirs| / |ours - start|, Euclidean over all weights."""
    assert set(ours) == set(theirs) == set(start), set(ours) ^ set(theirs)
    # The norm of the tensors' norms is the norm over all weights.
    distance = torch.stack([(ours[name] - theirs[name]).norm() for name in ours]).norm()
    way = torch.stack([(ours[name] - start[name]).norm() for name in ours]).norm()
    return float(distance / way)


HEADER = (
    "| variant | layout | advantages | token weights | logprobs | reference | entropies | loss | KL "
    "| gradient norm | weights after 1 | after 5 |"
)


def table(rows: Mapping[tuple[str, str], Differences]) -> str:
    """Write the table in Markdown."""
    lines = [HEADER, "|---|---|" + "---|" * 10]
    for (variant, layout), differences in rows.items():
        lines.append(f"| {variant} | {layout} | {' | '.join(map(_number, astuple(differences)))} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    """Write a cell of a table: nothing for NaN."""
    if math.isnan(value):
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def drift_table(
    fp32: tuple[Sequence[StepResult], Sequence[StepResult]],
    bf16: tuple[Sequence[StepResult], Sequence[StepResult]],
) -> str:
    """Write a table of GRPO over many steps: each pair of engines and precisions, by step."""
    pairs = {
        "embedded FP32, NeMo-RL FP32": fp32,
        "embedded BF16, NeMo-RL BF16": bf16,
        "embedded FP32, embedded BF16": (fp32[0], bf16[0]),
        "embedded FP32, NeMo-RL BF16": (fp32[0], bf16[1]),
    }
    steps = [number for number in (1, 2, 3, 5, 8, 10, 12, 16, 20) if number <= len(fp32[0])]
    lines = [
        "| pair | number | " + " | ".join(f"step {number}" for number in steps) + " |",
        "|---|---|" + "---|" * len(steps),
    ]
    for name, (ours, theirs) in pairs.items():
        for what in ("logprobs, mean", "gradient norm", "weights"):
            numbers = [_number(_drift(what, ours, theirs, number - 1)) for number in steps]
            lines.append(f"| {name} | {what} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _drift(what: str, ours: Sequence[StepResult], theirs: Sequence[StepResult], index: int) -> float:
    a, b = ours[index], theirs[index]
    if what == "weights":
        return way_apart(a.weights, b.weights, ours[0].start)
    if what == "gradient norm":
        return relative([(a.grad_norm, b.grad_norm)])
    mask = a.tensors["mask"].bool()
    return (a.tensors["logprobs"] - b.tensors["logprobs"])[mask].abs().mean().item()
