"""The quickstart, trained in BF16 and in each FP8 recipe of Transformer Engine, without a GPU.

    python benchmarks/fp8_quickstart.py [--out runs/fp8] [--steps 160] [--only NAME ...] [KEY=VALUE ...]

A whole run each: sampling, rewards, updates, validation, checkpoints. The policy is built of Transformer
Engine's layers, whose kernels torch computes in the same formats (`tests/integration/te_on_cpu.py`); the
sampler is the engine's own, in BF16. A finished run is not repeated; an interrupted one goes on.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in (".", "tests", "tests/integration")]

import te_on_cpu  # noqa: E402

te_on_cpu.install()  # before megatron-core is imported

from nemo_grpo.engine.loop import train as train_steps  # noqa: E402
from nemo_grpo.engine.megatron import model, options  # noqa: E402
from nemo_grpo.engine.run import begin  # noqa: E402
from nemo_grpo.recipe import load_recipe  # noqa: E402

HOPPER = options.Machine((9, 0), transformer_engine=True, cuda=(13, 0))
FP8 = "policy.megatron_cfg.fp8_cfg"
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "bf16-local": ("local", []),
    "bf16": ("transformer_engine", []),
    **{
        f"fp8-{recipe}-{form}": (
            "transformer_engine",
            [f"{FP8}.enabled=true", f"{FP8}.fp8_recipe={recipe}", f"{FP8}.fp8={form}"],
        )
        for recipe, form in (("tensorwise", "hybrid"), ("delayed", "hybrid"), ("blockwise", "e4m3"))
    },
}


def train(name: str, out: Path, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """The rows of the run's metrics."""
    impl, fp8 = SETTINGS[name]
    given = [
        *(f"nemo_grpo.runs_dir={out}", f"nemo_grpo.run_name={name}", f"grpo.max_num_steps={steps}"),
        *("policy.precision=bfloat16", *fp8, *overrides),
    ]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", given)
    with (
        mock.patch.object(model, "transformer_impl", return_value=impl),
        mock.patch.object(options, "this_machine", return_value=HOPPER),
    ):
        parts = begin(recipe, resume=(out / name).exists())
        if parts.state.step < steps:
            train_steps(parts)
    return [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Train what is not trained yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    print("| | accuracy before | after | sampler and policy differ by | gradient norm |")
    print("|---|---|---|---|---|")
    for name in given.only:
        rows = train(name, given.out, given.steps, given.overrides)
        accuracies = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
        updates = [row for row in rows if "grad_norm" in row]
        mismatch, norm = (
            mean(row[key] for row in updates) for key in ("mismatch/logprob_abs_mean", "grad_norm")
        )
        print(
            f"| {name} | {accuracies[0]:.3f} | {accuracies[-1]:.3f} | {mismatch:.4f} | {norm:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
