"""Our loss and its backward pass against NeMo-RL's `ClippedPGLossFn` on the same tensors.

    NEMO_RL_SRC=DIR .venv-nemo-rl/bin/python -m benchmarks.loss_vs_nemo_rl [--output FILE.md]

Both losses report the same metrics and reach the same value and gradient, which is checked. They alternate in
one process; the best of the repeats counts. On a CPU time is processor time of one thread, so that other
processes matter little; on a GPU it is the time until the device has finished.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "nemo_rl"), os.environ.get("NEMO_RL_SRC", "")]

import newer_python  # noqa: E402, F401
import torch  # noqa: E402

ROWS = 64
LENGTH = 4096
REPEATS = 5
KL = 0.01
"""Penalty of the settings that have one."""


def step_data(device: str) -> dict[str, torch.Tensor]:
    """Make a step of `ROWS` responses, whose sequences have 1024 to 4096 tokens with a prompt of 204."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, LENGTH + 1)
    positions = torch.arange(LENGTH + 1)
    ends = torch.randint(LENGTH // 4, LENGTH + 1, (ROWS, 1), generator=generator)

    def near(logprobs: torch.Tensor, distance: float) -> torch.Tensor:
        return logprobs + distance * torch.randn(shape, generator=generator)

    prev = -2 * torch.rand(shape, generator=generator)
    data = {
        "token_mask": ((positions >= LENGTH // 20) & (positions < ends)).float(),
        "sample_mask": torch.ones(ROWS),
        "prev_logprobs": prev,
        "generation_logprobs": near(prev, 0.02),
        "reference_policy_logprobs": near(prev, 0.1),
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(shape).clone(),
        "current": near(prev, 0.2)[:, 1:].clone(),
    }
    return {name: tensor.to(device) for name, tensor in data.items()}


def losses(kl: float) -> dict[str, Any]:
    """Make our loss and NeMo-RL's, with the same equation."""
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn

    from nemo_grpo.nemorl.loss import ObjectiveLoss
    from nemo_grpo.variants import parse_loss_fn

    ours = {"variant": "grpo", "reference_policy_kl_penalty": kl, "kl_score_function_gradient": kl > 0}
    return {
        "NeMo-RL": ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=kl)),
        "ours": ObjectiveLoss(parse_loss_fn(ours)),
    }


def seconds(work: Callable[[], Any], device: str) -> float:
    """Measure processor time on a CPU, elapsed time with a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def loss_and_gradient(loss_fn: Any, data: dict[str, torch.Tensor], rows: int) -> tuple[float, torch.Tensor]:
    """Compute the step in microbatches of ``rows``, each with its backward pass."""
    sizes = {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum(),
    }
    total = 0.0
    gradients = []
    for start in range(0, ROWS, rows):
        part = {name: tensor[start : start + rows] for name, tensor in data.items()}
        current = part["current"].requires_grad_()
        loss, metrics = loss_fn(current, part, **sizes)
        loss.backward()
        total += metrics["loss"]
        assert current.grad is not None
        gradients.append(current.grad)
    return total, torch.cat(gradients)


def compare_losses(device: str) -> list[str]:
    """Write a line per setting: milliseconds for the whole step, ratio."""
    lines = []
    data = step_data(device)
    for rows in (ROWS, 1):
        for kl in (0.0, KL):
            loss_fns = losses(kl)
            stock_loss, stock_gradient = loss_and_gradient(loss_fns["NeMo-RL"], data, rows)
            our_loss, our_gradient = loss_and_gradient(loss_fns["ours"], data, rows)
            assert abs(stock_loss - our_loss) < 1e-5, (stock_loss, our_loss)
            torch.testing.assert_close(stock_gradient, our_gradient, rtol=1e-4, atol=1e-9)
            best = dict.fromkeys(loss_fns, math.inf)
            for _ in range(REPEATS):
                # The losses alternate, so that other load meets both alike.
                for name, loss_fn in loss_fns.items():
                    work = partial(loss_and_gradient, loss_fn, data, rows)
                    best[name] = min(best[name], seconds(work, device))
            stock_ms = 1000 * best["NeMo-RL"]
            our_ms = 1000 * best["ours"]
            cells = f"{device} | {rows} | {kl:g} | {stock_ms:.1f} | {our_ms:.1f} | {our_ms / stock_ms:.2f}"
            lines.append(f"| {cells} |")
    return lines


def report() -> str:
    """Write everything as Markdown."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    lines = [
        "# Loss and backward pass against NeMo-RL's own",
        "",
        f"`benchmarks/loss_vs_nemo_rl.py`, {platform.processor() or platform.machine()}, "
        f"torch {torch.__version__}, one thread; {ROWS} responses, {LENGTH} tokens, best of {REPEATS}, "
        "both alternating.",
        "",
        "| device | rows per call | beta | NeMo-RL, ms | ours, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for device in devices:
        lines += compare_losses(device)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the table there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = report()
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


if __name__ == "__main__":
    main()
