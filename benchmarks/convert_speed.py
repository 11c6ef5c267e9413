"""Time of both converters against copying the same bytes, and against transformers' load and save.

The converters flush their result to disk before they give it its name; ``cp`` returns while data are still in
memory, so ``cp`` with a flush is shown too. Because a disk's speed varies, every repetition runs all
contestants one after the other, each on a disk with nothing left to write, and ratios are taken within a
repetition. Medians with the range, start-up of the processes included; the source is in the file cache.

    python -m benchmarks.convert_speed [--size 3] [--repeat 3] [--no-transformers] [--scratch DIR]
"""

import argparse
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.convert_models import flush, make_model, num_bytes
from benchmarks.peak_memory import processor_seconds

LOAD_AND_SAVE = (
    "import sys, torch; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])"
)
CP = "cp"
CP_AND_FLUSH = "cp and flush"
Action = Callable[[], None]


def seconds_of(action: Action, target: Path) -> tuple[float, float]:
    """Measure wall and processor time of an action that makes ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    processor_seconds_before = processor_seconds()
    start = time.monotonic()
    action()
    return time.monotonic() - start, processor_seconds() - processor_seconds_before


def run(*command: str) -> None:
    """Run a command with one thread per library."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)


def copy(source: Path, target: Path, then_flush: bool) -> None:
    """Copy with ``cp -r``, optionally until the data are on disk."""
    run("cp", "-r", str(source), str(target))
    if then_flush:
        flush(target)


def convert(direction: str, workers: int, hf: Path, megatron: Path, target: Path) -> None:
    """Convert in a process of its own."""
    source = ["--hf-model", str(hf)]
    if direction == "megatron-to-hf":
        source = ["--megatron-checkpoint", str(megatron), "--hf-config", str(hf)]
    base = [sys.executable, "-m", "checkpoints_conv", direction, *source]
    run(*base, "--output", str(target), "--workers", str(workers))


def contestants(hf: Path, megatron: Path, target: Path, transformers: bool) -> dict[str, Action]:
    """List everything that is timed; all make ``target``."""
    start_up = [sys.executable, "-m", "checkpoints_conv", "inspect", str(megatron)]
    actions: dict[str, Action] = {
        CP: functools.partial(copy, hf, target, False),
        CP_AND_FLUSH: functools.partial(copy, hf, target, True),
    }
    for direction, workers in itertools.product(("hf-to-megatron", "megatron-to-hf"), (1, 2)):
        actions[f"{direction}, {workers} workers"] = functools.partial(
            convert, direction, workers, hf, megatron, target
        )
    actions["start-up of the converters alone"] = functools.partial(run, *start_up)
    if transformers:
        command = (sys.executable, "-c", LOAD_AND_SAVE, str(hf), str(target))
        actions["transformers load and save_pretrained"] = functools.partial(run, *command)
    return actions


def spread(values: Sequence[float], digits: int) -> str:
    """Write median and range."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(times: dict[str, list[tuple[float, float]]], size: int) -> str:
    """Write a Markdown table, with ratios to the copies of the same repetition."""
    wall = {name: [seconds for seconds, _ in runs] for name, runs in times.items()}
    heads = ("", "seconds", "MB/s", "x cp", "x cp and flush", "processor seconds")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, seconds in wall.items():
        ratios = []
        for base in (CP, CP_AND_FLUSH):
            ratios_of_repetitions = [
                seconds_here / seconds_of_copy
                for seconds_here, seconds_of_copy in zip(seconds, wall[base], strict=True)
            ]
            ratios.append(spread(ratios_of_repetitions, 2))
        rate = f"{size / statistics.median(seconds) / 1e6:.0f}"
        processor = spread([used_seconds for _, used_seconds in times[name]], 1)
        lines.append("| " + " | ".join((name, spread(seconds, 1), rate, *ratios, processor)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=float, default=3.0, help="GB of bf16 weights")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        hf, megatron, target = (Path(scratch) / name for name in ("hf", "megatron", "target"))
        make_model(hf, options.size, sparse=False)
        convert("hf-to-megatron", 2, hf, megatron, megatron)
        actions = contestants(hf, megatron, target, options.transformers)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
        loads = [os.getloadavg()[0]]
        for _ in range(options.repeat):
            for name, action in actions.items():
                times[name].append(seconds_of(action, target))
            loads.append(os.getloadavg()[0])
        size = num_bytes(hf)
    print(f"{size / 1e9:.2f} GB, {options.repeat} repetitions, load average before and after each: ", end="")
    print(", ".join(f"{load:.1f}" for load in loads) + "\n")
    print(table(times, size))


if __name__ == "__main__":
    main()
