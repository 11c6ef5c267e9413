"""Time of both converters against copying the same bytes, and against transformers' load and save.

The converters flush their result to disk before they give it its name, so the reference is ``cp`` and a
flush; ``cp`` alone, which returns while data are still in memory, is shown beside it. Median of the
repetitions, start-up of the process included.

    python benchmarks/convert_speed.py [--size 2] [--repeat 3] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from convert_models import flush, make_model, num_bytes

LOAD_AND_SAVE = (
    "import sys, torch; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])"
)


def processor_seconds() -> float:
    """User and system time of all children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_of(action: Callable[[], None], target: Path, repeat: int) -> tuple[float, float]:
    """Median wall and processor time of an action that makes ``target``."""
    times = []
    for _ in range(repeat):
        shutil.rmtree(target, ignore_errors=True)
        start, used = time.monotonic(), processor_seconds()
        action()
        times.append((time.monotonic() - start, processor_seconds() - used))
    wall, processor = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(processor)


def run(*command: str) -> None:
    """Run a command with one thread per library; fail loudly."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)


def copy(source: Path, target: Path, then_flush: bool) -> None:
    """``cp -r``, optionally until the data are on disk."""
    run("cp", "-r", str(source), str(target))
    if then_flush:
        flush(target)


def convert(direction: str, workers: int, hf: Path, megatron: Path, target: Path) -> None:
    """One conversion in a process of its own, start-up included."""
    source = ["--hf-model", str(hf)]
    if direction == "megatron-to-hf":
        source = ["--megatron-checkpoint", str(megatron), "--hf-config", str(hf)]
    base = [sys.executable, "-m", "checkpoints_conv", direction, *source]
    run(*base, "--output", str(target), "--workers", str(workers))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=2.0, help="GB of bf16 weights")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        hf, megatron, target = (Path(scratch) / name for name in ("hf", "megatron", "target"))
        make_model(hf, options.size, sparse=False)
        convert("hf-to-megatron", 2, hf, megatron, megatron)
        start_up = [sys.executable, "-m", "checkpoints_conv", "inspect", str(megatron)]
        contestants: dict[str, Callable[[], None]] = {
            "cp and flush": lambda: copy(hf, target, True),
            "cp": lambda: copy(hf, target, False),
        }
        for direction, workers in itertools.product(("hf-to-megatron", "megatron-to-hf"), (1, 2)):
            contestants[f"{direction}, {workers} workers"] = functools.partial(
                convert, direction, workers, hf, megatron, target
            )
        contestants["start-up of the converters alone"] = functools.partial(run, *start_up)
        contestants["transformers load and save_pretrained"] = lambda: run(
            sys.executable, "-c", LOAD_AND_SAVE, str(hf), str(target)
        )
        print(f"{num_bytes(hf) / 1e9:.2f} GB, median of {options.repeat}\n")
        print("| | seconds | MB/s | x cp and flush | processor seconds |\n|---|---|---|---|---|")
        base = 0.0
        for name, action in contestants.items():
            seconds, processor = seconds_of(action, target, options.repeat)
            base = base or seconds
            rate = num_bytes(hf) / seconds / 1e6
            print(
                f"| {name} | {seconds:.1f} | {rate:.0f} | {seconds / base:.2f} | {processor:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
