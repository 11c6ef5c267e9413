"""Peak resident memory of both converters against the size of the model.

Every conversion runs in a process of its own; the figure is the kernel's peak RSS of that process. Models
differ in their number of layers only. The source is sparse; the results are not, so a model of 16 GB needs
32 GB of free disk.

    python benchmarks/convert_memory.py [--sizes 1.5 4] [--workers 2] [--family moonlight] [--scratch DIR]
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from convert_models import config_of, make_model, num_bytes
from peak_memory import in_child

RESULTS = Path(__file__).parent / "results"


def measure(scratch: Path, size: float, workers: int, family: str) -> list[dict[str, float | str]]:
    """Both directions for one size."""
    hf, megatron, back = scratch / "hf", scratch / "megatron", scratch / "back"
    largest = make_model(hf, size, sparse=True, family=family)
    runs = {
        "hf-to-megatron": ["--hf-model", hf, "--output", megatron],
        "megatron-to-hf": ["--megatron-checkpoint", megatron, "--hf-config", hf, "--output", back],
    }
    rows: list[dict[str, float | str]] = []
    for name, options in runs.items():
        seconds, peak = in_child("checkpoints_conv", name, *options, "--workers", str(workers))
        limit = 500e6 + 3 * largest * workers
        rows.append(
            {
                "direction": name,
                "gigabytes": num_bytes(hf) / 1e9,
                "peak_gigabytes": peak / 1e9,
                "limit_gigabytes": limit / 1e9,
                "seconds": seconds,
            }
        )
        print(
            f"| {name} | {num_bytes(hf) / 1e9:.2f} | {workers} | {peak / 1e9:.3f} | {limit / 1e9:.2f} | "
            f"{seconds:.0f} |",
            flush=True,
        )
    for folder in (hf, megatron, back):
        shutil.rmtree(folder)
    return rows


def plot(rows: list[dict[str, float | str]], workers: int) -> None:
    """RSS against size, with the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name in ("hf-to-megatron", "megatron-to-hf"):
        chosen = [row for row in rows if row["direction"] == name]
        points = ([row[key] for row in chosen] for key in ("gigabytes", "peak_gigabytes"))
        axes.plot(*points, marker="o", label=name)
    sizes = sorted({float(row["gigabytes"]) for row in rows})
    axes.plot(sizes, sizes, linestyle=":", color="gray", label="whole model in memory")
    axes.axhline(float(rows[0]["limit_gigabytes"]), linestyle="--", color="black", label="limit")
    axes.set(xlabel="model, GB", ylabel="peak RSS, GB", title=f"{workers} workers", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "convert_memory.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.5, 4], help="GB of bf16 weights")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", choices=("qwen2", "moonlight"), default="qwen2", help="whose shapes")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to use")
    options = parser.parse_args()
    try:
        for size in options.sizes:
            config_of(size, options.family)
    except ValueError as error:
        parser.error(f"--sizes {error}")
    print("| direction | model GB | workers | peak RSS GB | limit GB | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        rows = []
        for size in options.sizes:
            rows += measure(Path(scratch), size, options.workers, options.family)
    if options.family == "qwen2":
        plot(rows, options.workers)


if __name__ == "__main__":
    main()
