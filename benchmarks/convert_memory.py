"""Peak resident memory of both converters against the size of the model.

Every conversion runs in a process of its own; the figure is the kernel's peak RSS of that process. Models
differ in their number of layers only. The source is sparse; the results are not, so a model of 16 GB needs
32 GB of free disk.

    python -m benchmarks.convert_memory [--sizes 1.5 4] [--workers 2] [--family moonlight] [--scratch DIR]
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.convert_models import CONFIGS, config_of, make_model, num_bytes
from benchmarks.peak_memory import in_child


def measure(scratch: Path, size: float, workers: int, family: str) -> None:
    """Print a row of each direction for one size."""
    hf = scratch / "hf"
    megatron = scratch / "megatron"
    back = scratch / "back"
    largest = make_model(hf, size, sparse=True, family=family)
    runs: dict[str, list[str | Path]] = {
        "hf-to-megatron": ["--hf-model", hf, "--output", megatron],
        "megatron-to-hf": ["--megatron-checkpoint", megatron, "--hf-config", hf, "--output", back],
    }
    for name, options in runs.items():
        seconds, peak = in_child("checkpoints_conv", name, *options, "--workers", str(workers))
        limit = 500e6 + 3 * largest * workers
        print(
            f"| {name} | {num_bytes(hf) / 1e9:.2f} | {workers} | {peak / 1e9:.3f} | {limit / 1e9:.2f} | "
            f"{seconds:.0f} |",
            flush=True,
        )
    for folder in (hf, megatron, back):
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.5, 4], help="GB of bf16 weights")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", choices=CONFIGS, default="qwen2", help="whose shapes")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to use")
    options = parser.parse_args()
    try:
        for size in options.sizes:
            config_of(size, options.family)
    except ValueError as error:
        parser.error(f"--sizes {error}")
    print("| direction | model GB | workers | peak RSS GB | limit GB | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for size in options.sizes:
            measure(Path(scratch), size, options.workers, options.family)


if __name__ == "__main__":
    main()
