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
    """Name of a part -> its time limit in seconds, its arguments for Python."""
    own, few = str(Path(__file__)), ["--dry-run"] if dry else []
    pytest = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-rP", "-p", "no:cacheprovider", "-W", "default"]
    update = ["benchmarks/gpu_policy_update.py", "--fp8-recipe", "tensorwise", "delayed", "blockwise"]
    sizes, fewer = ["--steps", "8", "--sequences", "16"], ["--steps", "6", "--sequences", "8"]
    found = {
        "ceilings": (30, [own, str(out), "--one", "ceilings", *few]),
        "tests": (150, pytest),
        "update": (100, [*update, *sizes, "--shape", "qwen2.5-1.5b", "--output", f"{out}/update-1.5b.json"]),
        "loss": (40, ["-c", LOSS]),
        "killed": (90, [own, str(out), "--one", "killed", *few]),
        "steps": (60, [own, str(out), "--one", "steps", *few]),
        "update-7b": (100, [*update, *fewer, "--shape", "qwen2.5-7b", "--output", f"{out}/update-7b.json"]),
    }
    if "NEMO_RL_SRC" not in os.environ:
        del found["loss"]
    return found


def run_parts(out: Path, wanted: list[str] | None, dry: bool) -> dict[str, Any]:
    """Run the parts one after another. Returns: part -> exit code and seconds, also in OUT/parts.json."""
    out.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name, (limit, arguments) in parts(out, dry).items():
        if wanted and name not in wanted:
            continue
        begun, log, limit = time.monotonic(), out / f"{name}.txt", limit * (10 if dry else 1)
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"more than {limit} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        done[name] = {"exit": code, "seconds": round(time.monotonic() - begun, 1)}
        (out / "parts.json").write_text(json.dumps(done, indent=1))
        print(f"{name}: {done[name]}", flush=True)
    return done


def keep(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Write a part's figures to a file of their own, and print them."""
    (out / f"{name}.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))


def ceilings(out: Path, dry: bool) -> None:
    """Rates that this GPU reaches: BF16 matrix product, copies within its memory, from and to the host."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 256 if dry else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    big = torch.empty(n * n * (1 if dry else 32), dtype=torch.bfloat16, device=device)
    other, host = torch.empty_like(big), torch.empty(n * n, dtype=torch.bfloat16, pin_memory=device == "cuda")
    size, part = big.nbytes, big[: n * n]

    def median_seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    cuda = device == "cuda"
    figures = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "torch": torch.__version__,
        "bf16_flops": 2 * n**3 / median_seconds(lambda: a @ b),
        "copy_bytes_per_second": 2 * size / median_seconds(lambda: other.copy_(big)),
        "to_host_bytes_per_second": host.nbytes / median_seconds(lambda: host.copy_(part)),
        "from_host_bytes_per_second": host.nbytes / median_seconds(lambda: part.copy_(host)),
    }
    keep(out, "ceilings", figures)


def killed(out: Path, dry: bool) -> None:
    """The quickstart, killed halfway and resumed: seconds a step on both sides, validations."""
    steps, runs = (4, out / "runs") if dry else (40, out / "runs")
    small = ["grpo.max_val_samples=8"] if dry else []
    command = [sys.executable, "-m", "nemo_grpo.cli", "train", QUICKSTART, f"grpo.max_num_steps={steps}"]
    command += [f"nemo_grpo.runs_dir={runs}", f"checkpointing.save_period={steps // 4}", *small]
    command += [f"grpo.val_period={steps // 2}"]
    metrics = runs / "quickstart" / "metrics.jsonl"
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and last_step(metrics) < steps // 2:
        time.sleep(0.02)
    process.kill()
    process.wait()
    halfway, seconds = last_step(metrics), time.monotonic() - begun
    begun = time.monotonic()
    resumed = subprocess.run([*command, "--resume"], cwd=ROOT, check=False)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    timed = [row for row in rows if "time/step" in row]
    figures = {
        "exit": resumed.returncode,
        "seconds": [round(seconds, 1), round(time.monotonic() - begun, 1)],
        "killed_at": halfway,
        "steps": [row["step"] for row in rows],
        "median": {
            key: statistics.median(row[key] for row in timed if key in row)
            for key in ("time/step", "time/rollout", "time/score", "time/update", "tokens_per_second")
        },
        "accuracy": {row["step"]: row[key] for row in rows for key in row if key == "validation/accuracy"},
        "reward": [round(row["reward/mean"], 3) for row in timed],
    }
    keep(out, "killed", figures)


def last_step(metrics: Path) -> int:
    """The newest step in a run's metrics.jsonl; -1 before there is one."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else -1
    except ValueError:  # half a line
        return -1


def steps(out: Path, dry: bool) -> None:
    """Steps in this process: seconds and peak memory by phase beside the plan's, and where the host waits."""
    from nemo_grpo.engine.checks import Start, choose_device
    from nemo_grpo.engine.new_model import write_new_model
    from nemo_grpo.engine.setup import set_up
    from nemo_grpo.plan.planner import plan_recipe
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.recipe.own import NewModel

    made = f"nemo_grpo.runs_dir={out}/steps"
    figures: dict[str, Any] = {}
    overrides = [made, "checkpointing.enabled=false", "grpo.val_at_start=false", "grpo.val_at_end=false"]
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
    for name, more in sizes.items():
        recipe = load_recipe(ROOT / QUICKSTART, [*overrides, *more, f"nemo_grpo.run_name={name}"])
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
        del run


def one_step(run: Any) -> dict[str, Any]:
    """A step of the algorithm, without its record."""
    from nemo_grpo.engine.steps import reinforce, sample

    return reinforce(run.learner, sample(run.rollouts, run.learner), run.recorder.diagnostics)


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Within the block every lap of a step's clock notes the phase's peak of allocated memory, in bytes."""
    import torch

    from nemo_grpo.engine.step_metrics import Clock

    lap, peaks = Clock.lap, dict[str, int]()

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
    """Places where one step's learning waits for the GPU, and how often."""
    import torch

    learn, cuda = run.learner.learn, torch.cuda.is_available()
    found: Counter[str] = Counter()

    def watched(*arguments: Any) -> Any:
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return learn(*arguments)
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
            waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
            found.update(f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in waits)

    run.learner.learn = watched
    one_step(run)
    del run.learner.learn
    return dict(found.most_common())


def profile(run: Any) -> dict[str, Any]:
    """One step's learning under the profiler: its time, the kernels', copies to the host, waits."""
    import torch

    learn, seen = run.learner.learn, dict[str, Any]()
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []

    def profiled(*arguments: Any) -> Any:
        start = time.perf_counter()
        with torch.profiler.profile(activities=activities) as profiler:
            result = learn(*arguments)
            seen["learn_seconds"] = time.perf_counter() - start
        events = profiler.key_averages()
        on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        seen["gpu_seconds"] = sum(e.self_device_time_total for e in on_gpu) / 1e6
        seen["kernels"] = sum(e.count for e in on_gpu)
        waits = ("Synchronize", "DtoH", "aten::item")
        seen["calls"] = {e.key: e.count for e in events if any(name in e.key for name in waits)}
        longest = sorted(on_gpu, key=lambda e: -e.self_device_time_total)[:12]
        seen["longest"] = {e.key[:90]: [e.count, round(e.self_device_time_total)] for e in longest}
        return result

    run.learner.learn = profiled
    one_step(run)
    del run.learner.learn
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", help="default: all")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", choices=("ceilings", "killed", "steps"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.one:
        {"ceilings": ceilings, "killed": killed, "steps": steps}[options.one](out, options.dry_run)
        return 0
    done = run_parts(out, options.parts, options.dry_run)
    return int(any(part["exit"] != 0 for part in done.values()))


if __name__ == "__main__":
    sys.exit(main())
