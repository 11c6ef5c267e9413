"""Everything that needs a GPU, in one visit: tests, updates, losses, a run, its memory, its waits.

    PYTHONPATH=. python scripts/gpu_visit.py OUT [--parts tests update ...] [--dry-run]

Each part is a process with a time limit and writes its figures under OUT before the next begins; one that
fails does not stop the others. NEMO_RL_SRC names NeMo-RL's source, without which `loss` is left out.
--dry-run needs no GPU: smaller sizes, and what refuses to run on a CPU says so.

A host with torch for CUDA 13, transformers and pytest, but no network, needs these wheels besides, installed
with --no-deps: megatron-core, pydantic, pydantic-core, annotated-types, typing-inspection, omegaconf,
antlr4-python3-runtime, math-verify, latex2sympy2-extended, typer, annotated-doc; and for Transformer Engine,
whose library `thin_gpu_library.py` makes small, importlib-metadata and nvdlfw-inspect.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICKSTART = "recipes/quickstart.yaml"
LOSS = "from benchmarks.loss_vs_nemo_rl import compare_losses as c; print(*c('cuda'), sep='\\n')"


def parts(out: Path, dry: bool) -> dict[str, tuple[int, list[str]]]:
    """Return, by a part's name, its time limit in seconds and its arguments for Python."""

    def this_script(part: str) -> list[str]:
        arguments = [str(Path(__file__)), str(out), "--one", part]
        return [*arguments, "--dry-run"] if dry else arguments

    def update(shape: str, steps: int, sequences: int, output: str) -> list[str]:
        arguments = ["benchmarks/gpu_policy_update.py", "--fp8-recipe", "tensorwise", "delayed", "blockwise"]
        arguments += ["--steps", str(steps), "--sequences", str(sequences)]
        return [*arguments, "--shape", shape, "--output", f"{out}/{output}"]

    pytest = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-rP", "-p", "no:cacheprovider", "-W", "default"]
    limited_arguments = {
        "ceilings": (30, this_script("ceilings")),
        "tests": (150, pytest),
        "update": (100, update("qwen2.5-1.5b", 8, 16, "update-1.5b.json")),
        "loss": (40, ["-c", LOSS]),
        "killed": (90, this_script("killed")),
        "steps": (60, this_script("steps")),
        "update-7b": (100, update("qwen2.5-7b", 6, 8, "update-7b.json")),
    }
    if "NEMO_RL_SRC" not in os.environ:
        del limited_arguments["loss"]
    return limited_arguments


def run_parts(out: Path, names: list[str] | None, dry: bool) -> dict[str, Any]:
    """Run the parts one after another.

    Args:
        out: folder of the figures.
        names: parts to run; None: all.
        dry: run small, without a GPU.

    Returns:
        Part -> exit code and seconds, which OUT/parts.json has, too.
    """
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path}
    for name, (limit, arguments) in parts(out, dry).items():
        if names and name not in names:
            continue
        if dry:
            limit *= 10  # a CPU is slower
        start = time.monotonic()
        code = run_part(arguments, environment, out / f"{name}.txt", limit)
        results[name] = {"exit": code, "seconds": round(time.monotonic() - start, 1)}
        # After every part: the visit itself may be cut off.
        (out / "parts.json").write_text(json.dumps(results, indent=1))
        print(f"{name}: {results[name]}", flush=True)
    return results


def run_part(arguments: list[str], environment: dict[str, str], log: Path, limit: int) -> int | str:
    """Run one part; returns its exit code, or a text if it took more than ``limit`` seconds."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that the limit ends the ranks that the part has started, too.
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"more than {limit} s"


def keep(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Write a part's figures to a file of their own, and print them."""
    (out / f"{name}.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))


def ceilings(out: Path, dry: bool) -> None:
    """Measure rates of this GPU: BF16 matrix product, copies within its memory, from and to the host."""
    import torch

    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    n = 256 if dry else 8192
    num_matrices = 1 if dry else 32  # together larger than the caches of a GPU
    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    b = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    source = torch.empty(n * n * num_matrices, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    matrix = source[: n * n]
    # Pinned, because copies from pageable memory are slower.
    host = torch.empty(n * n, dtype=torch.bfloat16, pin_memory=has_gpu)

    def median_seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            if has_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        # The first runs load kernels and choose algorithms.
        return statistics.median(times[3:])

    figures = {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        "torch": torch.__version__,
        "bf16_flops": 2 * n**3 / median_seconds(lambda: a @ b),
        # A copy within the memory reads and writes every byte.
        "copy_bytes_per_second": 2 * source.nbytes / median_seconds(lambda: target.copy_(source)),
        "to_host_bytes_per_second": host.nbytes / median_seconds(lambda: host.copy_(matrix)),
        "from_host_bytes_per_second": host.nbytes / median_seconds(lambda: matrix.copy_(host)),
    }
    keep(out, "ceilings", figures)


def killed(out: Path, dry: bool) -> None:
    """Train the quickstart, killed halfway and resumed: seconds a step on both sides, validations."""
    num_steps = 4 if dry else 40
    runs = out / "runs"
    command = [sys.executable, "-m", "nemo_grpo.cli", "train", QUICKSTART, f"grpo.max_num_steps={num_steps}"]
    command += [f"nemo_grpo.runs_dir={runs}", f"checkpointing.save_period={num_steps // 4}"]
    command += [f"grpo.val_period={num_steps // 2}"]
    if dry:
        command.append("grpo.max_val_samples=8")
    metrics = runs / "quickstart" / "metrics.jsonl"
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and last_step(metrics) < num_steps // 2:
        time.sleep(0.02)
    # SIGKILL, which leaves the run no time to save.
    process.kill()
    process.wait()
    killed_at = last_step(metrics)
    seconds_until_kill = time.monotonic() - start
    start = time.monotonic()
    resumed = subprocess.run([*command, "--resume"], cwd=ROOT, check=False)
    seconds_resumed = time.monotonic() - start
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    timed_rows = [row for row in rows if "time/step" in row]
    medians = {}
    for key in ("time/step", "time/rollout", "time/score", "time/update", "tokens_per_second"):
        medians[key] = statistics.median(row[key] for row in timed_rows if key in row)
    accuracy = "validation/accuracy"
    figures = {
        "exit": resumed.returncode,
        "seconds": [round(seconds_until_kill, 1), round(seconds_resumed, 1)],
        "killed_at": killed_at,
        "steps": [row["step"] for row in rows],
        "median": medians,
        "accuracy": {row["step"]: row[accuracy] for row in rows if accuracy in row},
        "reward": [round(row["reward/mean"], 3) for row in timed_rows],
    }
    keep(out, "killed", figures)


def last_step(metrics: Path) -> int:
    """Read the newest step in a run's metrics.jsonl; -1 before there is one."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if not lines:
        return -1
    try:
        return int(json.loads(lines[-1])["step"])
    except ValueError:
        # The run is writing the line.
        return -1


def steps(out: Path, dry: bool) -> None:
    """Make steps in this process: seconds and memory by phase, the plan's memory, waits of the host."""
    from nemo_grpo.engine.checks import Start, choose_device
    from nemo_grpo.engine.new_model import write_new_model
    from nemo_grpo.engine.setup import set_up
    from nemo_grpo.plan.planner import plan_recipe
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.recipe.own import NewModel

    figures: dict[str, Any] = {}
    overrides = [f"nemo_grpo.runs_dir={out}/steps", "checkpointing.enabled=false"]
    overrides += ["grpo.val_at_start=false", "grpo.val_at_end=false"]
    overrides += ["nemo_grpo.export.hf=false", "grpo.val_period=0", "nemo_grpo.engine.diagnostics_period=0"]
    overrides += ["policy.precision=bfloat16", "loss_fn.reference_policy_kl_penalty=0.01"]
    sizes: dict[str, list[str]] = {"quickstart": []}
    if not dry:
        model = out / "smollm2-135m"
        shape = NewModel(
            vocab_size=49152,
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
        )
        write_new_model(shape, load_recipe(ROOT / QUICKSTART).task.build(), model)
        sizes["smollm2-135m"] = [f"policy.model_name={model}", "grpo.num_prompts_per_step=8"]
    for name, size_overrides in sizes.items():
        run_name = f"nemo_grpo.run_name={name}"
        recipe = load_recipe(ROOT / QUICKSTART, [*overrides, *size_overrides, run_name])
        start = Start(choose_device(recipe), recipe.task.build())
        run = set_up(recipe, Path(recipe.policy.model_name or ""), start)
        with peak_memory() as peaks:
            rows = [one_step(run) for _ in range(2 if dry else 6)]
        laps = [key for key in rows[0] if key.startswith("time/")]
        figures[name] = {
            "seconds": {key: [round(row[key], 4) for row in rows] for key in laps},
            "peak_bytes": peaks,
            "planned_bytes": plan_recipe(recipe).peaks,
            "waits": host_waits(run),
            "profile": profile(run),
        }
        keep(out, "steps", figures)
        # Before the next model is built, which needs the memory.
        del run


def one_step(run: Any) -> dict[str, Any]:
    """Make a step of the algorithm, without its record."""
    from nemo_grpo.engine.steps import reinforce, sample

    return reinforce(run.learner, sample(run.rollouts, run.learner), run.recorder.diagnostics)


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Measure each phase's peak of allocated memory in bytes, at every lap of a step's clock in the block."""
    import torch

    from nemo_grpo.engine.step_metrics import Clock

    lap = Clock.lap
    peaks: dict[str, int] = {}

    def noting(self: Clock, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        lap(self, name)

    Clock.lap = noting  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        Clock.lap = lap  # type: ignore[method-assign]


def host_waits(run: Any) -> dict[str, int]:
    """Count where one step's learning waits for the GPU."""
    import torch

    learn = run.learner.learn
    has_gpu = torch.cuda.is_available()
    waits: Counter[str] = Counter()

    def watched(*arguments: Any) -> Any:
        if has_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                # Python would show a place's warning once.
                warnings.simplefilter("always")
                return learn(*arguments)
        finally:
            if has_gpu:
                torch.cuda.set_sync_debug_mode("default")
            for warning in caught:
                if "synchroniz" in str(warning.message):
                    file = "/".join(Path(warning.filename).parts[-3:])
                    waits[f"{file}:{warning.lineno}"] += 1

    run.learner.learn = watched
    one_step(run)
    # Uncovers the method of the class.
    del run.learner.learn
    return dict(waits.most_common())


def profile(run: Any) -> dict[str, Any]:
    """Profile one step's learning: its time, the kernels', copies to the host, waits."""
    import torch

    learn = run.learner.learn
    figures: dict[str, Any] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def profiled(*arguments: Any) -> Any:
        start = time.perf_counter()
        with torch.profiler.profile(activities=activities) as profiler:
            result = learn(*arguments)
            figures["learn_seconds"] = time.perf_counter() - start
        events = profiler.key_averages()
        kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        figures["gpu_seconds"] = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
        figures["kernels"] = sum(kernel.count for kernel in kernels)
        waits = ("Synchronize", "DtoH", "aten::item")
        figures["calls"] = {
            event.key: event.count for event in events if any(name in event.key for name in waits)
        }
        by_time = sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)
        figures["longest"] = {
            kernel.key[:90]: [kernel.count, round(kernel.self_device_time_total)] for kernel in by_time[:12]
        }
        return result

    run.learner.learn = profiled
    one_step(run)
    del run.learner.learn
    return figures


def main() -> int:
    """Run the parts, or the one that `run_parts` has started; returns 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", help="default: all")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", choices=("ceilings", "killed", "steps"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.one:
        part = {"ceilings": ceilings, "killed": killed, "steps": steps}[options.one]
        part(out, options.dry_run)
        return 0
    results = run_parts(out, options.parts, options.dry_run)
    has_failed = any(result["exit"] != 0 for result in results.values())
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
