"""What FP8 changes in scores, gradients and 50 updates: Transformer Engine's recipes beside BF16, on a CPU.

    python benchmarks/fp8_drift.py [--steps 50] [--output FILE]

Transformer Engine's Python code and megatron-core's layers run as on a GPU, with kernels computed by torch in
the same formats (`tests/integration/te_on_cpu.py`); only the order of sums and the speed are not a GPU's. The
model is small and its weights are random: 4 layers, width 256, 8 sequences of 20 to 48 tokens, GPG at a
learning rate of 1e-3 on the same rollout again and again. Compare the rows with each other; how far a trained
model drifts is a question for `benchmarks/gpu_policy_update.py`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in (".", "tests", "tests/integration", "tests/gpu")]

import te_cases  # noqa: E402  # it makes Transformer Engine importable

from nemo_grpo.engine.megatron.options import FP8_CAPABILITY  # noqa: E402

ENDS_IN_BF16 = {"first_last_layers_bf16": True}


def settings() -> dict[str, dict[str, Any]]:
    """Fields of TransformerConfig by the name that the table gives them."""
    found: dict[str, dict[str, Any]] = {"bf16, local layers": {"impl": "local"}, "bf16": {}}
    for recipe in sorted(FP8_CAPABILITY, reverse=True):
        for form in ("hybrid", "e4m3"):
            found[f"fp8 {recipe}, {form}"] = {"fp8": form, "fp8_recipe": recipe}
    found["fp8 blockwise, e4m3, ends in bf16"] = found["fp8 blockwise, e4m3"] | ENDS_IN_BF16
    return found


def main() -> None:
    """Print a table against BF16 on Transformer Engine's layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="updates (default 50)")
    parser.add_argument("--output", type=Path, help="also write the loss curves there, as JSON")
    arguments = parser.parse_args()
    runs = {name: te_cases.updates(arguments.steps, **fields) for name, fields in settings().items()}
    bf16 = runs["bf16"]
    last = arguments.steps - 1
    print(
        f"| | change of a logprob: mean, most | 1st gradient norm | loss 1 | loss {last + 1} | widest gap |"
    )
    print("|---|---|---|---|---|---|")
    for name, run in runs.items():
        drift = (run["scores"] - bf16["scores"]).abs()
        gap = max(abs(a - b) for a, b in zip(run["losses"], bf16["losses"], strict=True))
        norm = run["grad_norms"][0] / bf16["grad_norms"][0]
        print(
            f"| {name} | {drift.mean():.4f}, {drift.max():.3f} | {norm:.3f} x | "
            f"{run['losses'][0]:.3f} | {run['losses'][last]:.3f} | {gap:.3f} |"
        )
    if arguments.output:
        curves = {name: {key: run[key] for key in ("losses", "grad_norms")} for name, run in runs.items()}
        arguments.output.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
