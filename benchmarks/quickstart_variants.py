"""Every variant's quickstart recipe on several seeds from one warm start: a table and one report.

A run that is already finished is not run again, an unfinished one is resumed, so the command can be repeated.

    python benchmarks/quickstart_variants.py [--variants grpo,gpg] [--seeds 0,1,2] [--jobs 2] [--runs DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_grpo.variants import VARIANTS

ROOT = Path(__file__).parents[1]
COLUMNS = ("accuracy", "greedy", "pass@8", "num_tokens")


def recipe_of(variant: str) -> Path:
    return ROOT / "recipes" / ("quickstart.yaml" if variant == "grpo" else f"quickstart-{variant}.yaml")


def train(variant: str, seed: int, runs: Path, overrides: list[str]) -> Path:
    """Run one seed of one variant to its end and return its folder."""
    folder = runs / f"{variant}-s{seed}"
    if (folder / "hf").exists():
        return folder
    command = [sys.executable, "-m", "nemo_grpo.cli", "train", str(recipe_of(variant)), "--resume"]
    command += [
        f"grpo.seed={seed}",
        f"nemo_grpo.runs_dir={runs}",
        f"nemo_grpo.run_name={folder.name}",
        *overrides,
    ]
    with (runs / f"{folder.name}.log").open("a") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
    print(f"finished {folder}", flush=True)
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def line(variant: str, folders: list[Path]) -> str:
    """One variant's row: each figure as mean +- sample standard deviation over the seeds."""
    metrics = [rows(folder) for folder in folders]
    start = [m[0]["validation/accuracy"] for m in metrics]
    cells = [spread([m[-1][f"validation/{column}"] for m in metrics]) for column in COLUMNS]
    rise = min(m[-1]["validation/accuracy"] - first for m, first in zip(metrics, start, strict=True))
    entropy = spread([m[-1]["entropy/mean"] for m in metrics])
    seconds = spread(
        [sum(r.get("time/step", 0) + r.get("time/validation", 0) for r in m) for m in metrics], 0
    )
    return " | ".join([variant, spread(start), *cells, f"{rise:+.3f}", entropy, seconds])


def spread(values: list[float], digits: int = 3) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "variants")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    variants, seeds = arguments.variants.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    jobs = [(variant, seed) for seed in seeds for variant in variants]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        folders = dict(
            zip(
                jobs,
                pool.map(lambda job: train(*job, arguments.runs, arguments.overrides), jobs),
                strict=True,
            )
        )
    print(
        "variant | accuracy at start | accuracy | greedy | pass@8 | tokens | least rise | entropy | seconds"
    )
    print("---|---|---|---|---|---|---|---|---")
    for variant in variants:
        print(line(variant, [folders[variant, seed] for seed in seeds]))
    report = [sys.executable, "-m", "nemo_grpo.cli", "report", *map(str, folders.values())]
    subprocess.run([*report, "-o", str(arguments.runs / "report.html")], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
