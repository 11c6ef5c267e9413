"""The planner's time of embedded runs on this machine's CPU against the phases that real runs record.

Every size is a run of its own in a process of its own: the quickstart's task on a made-up policy, with a KL
penalty, so that there is a reference pass and every response has a gradient. The machine is measured just
before and just after. Runs and measurements count the process's CPU seconds on one thread: what else runs
takes no part in them, but shares caches and memory. The first step, which warms up, is left out.

    python benchmarks/plan_vs_this_machine.py --measure    # runs, a row each in benchmarks/published/
    python benchmarks/plan_vs_this_machine.py              # the table; each model by constants without it
    python benchmarks/plan_vs_this_machine.py --fit        # the constants of nemo_grpo/plan/efficiency.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plan_vs_measured import RECIPE, bare_run
from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.efficiency import LOCAL, Local
from nemo_grpo.plan.embedded_time import embedded_step
from nemo_grpo.plan.forecast import Assumptions
from nemo_grpo.plan.interval import Seen, seen_of
from nemo_grpo.plan.machine import Machine, measure
from nemo_grpo.plan.presets import shape_of
from nemo_grpo.plan.setup import Setup, setup_of
from nemo_grpo.plan.step_time import ROLLOUT, UPDATE
from nemo_grpo.plan.workload import Workload
from nemo_grpo.recipe import Recipe, load_recipe

FILE = Path(__file__).parent / "published" / "this_machine.jsonl"
SIZES = {"128x2": 21, "256x4": 21, "512x8": 3, "768x12": 3}
"""Steps of each: small ones are short, and other work shows."""
PRIOR = Local(moved=4.0, logits=60.0, decode=40.0, train=200.0, sample=100.0)
"""Operations as counted in the code, roughly; as much is allowed for as standard deviation."""
NOISE = 0.1
NAMES = tuple(field.name for field in fields(Local))


@cache
def recipe_of(size: str, precision: str, runs: str = "runs") -> Recipe:
    """A short run of the quickstart with a policy of this size."""
    short = (f"grpo.max_num_steps={SIZES[size]}", "logger.tensorboard_enabled=false")
    own = (f"policy.precision={precision}", f"nemo_grpo.runs_dir={runs}")
    return load_recipe(RECIPE, [*bare_run(size), *short, *own])


def run(size: str, precision: str) -> dict[str, Any]:
    """Train in this process; what the run recorded, and the machine beside it."""
    from nemo_grpo.engine import records
    from nemo_grpo.engine.trainer import Trainer

    records.time = SimpleNamespace(monotonic=time.process_time)  # the phases in CPU seconds
    with tempfile.TemporaryDirectory() as runs:
        recipe = recipe_of(size, precision, runs)
        machines = [_machine(recipe)]
        trainer = Trainer(recipe)
        problems = [trainer.task.train_problem(index, 0) for index in range(64)]
        prompts = [len(prompt) for prompt in trainer._encode(problems)]
        trainer.train()
        machines.append(_machine(recipe))
        rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    names = ("time/rollout", "time/score", "time/update", "length/mean")
    found = {name: median(row[name] for row in rows) for name in names}
    return {
        "size": size,
        "precision": precision,
        "prompt": sum(prompts) / len(prompts),
        **found,
        "machines": [asdict(machine) for machine in machines],
    }


def _machine(recipe: Recipe) -> Machine:
    setup = setup_of(recipe)
    return measure(shape_of(recipe), setup.train_tokens, num_bytes=setup.precision_bytes)


@dataclass(frozen=True)
class Row:
    """A measured run. Attributes: phases: CPU seconds as the engine divides a step."""

    size: str
    precision: str
    prompt: float
    length: float
    machine: Machine
    phases: dict[str, float]

    @cached_property
    def inputs(self) -> tuple[ModelSpec, Setup, Workload]:
        """Of its recipe, with the lengths that it had."""
        recipe = recipe_of(self.size, self.precision)
        work = Assumptions(self.length, self.prompt).work_of(recipe)
        return shape_of(recipe), setup_of(recipe), work

    def predict(self, eff: Local) -> dict[str, float]:
        """The same phases: weights go to the sampler, and responses are scored, within the rollout."""
        p = embedded_step(*self.inputs, self.machine, eff).phases
        return {
            "rollout": sum(p[name] for name in (*ROLLOUT, "refit", "rewards, data, logs")),
            "score": p["scoring"] + p["swaps to the host"],
            "update": sum(p[name] for name in UPDATE),
        }


def read_rows() -> list[Row]:
    """All measured runs."""
    return [_row(json.loads(line)) for line in FILE.read_text().splitlines()]


def _row(found: dict[str, Any]) -> Row:
    """The machine is as fast as in the better of both measurements, rate by rate."""
    before, after = found["machines"]
    names = ("memory_bytes", "backward", "memory", "attention", "cache")
    best = {name: max(before[name], after[name]) for name in names}
    for name in ("forward", "sampling"):
        rates = zip(before[name], after[name], strict=True)
        best[name] = tuple((rows, max(rate, other)) for (rows, rate), (_, other) in rates)
    machine = Machine(operation=min(before["operation"], after["operation"]), **best)
    phases = {name: found[f"time/{name}"] for name in ("rollout", "score", "update")}
    return Row(found["size"], found["precision"], found["prompt"], found["length/mean"], machine, phases)


def fit(rows: Sequence[Row]) -> Local:
    """Least squares of relative errors, near `PRIOR`; predictions are linear in the constants."""
    nothing = Local(**dict.fromkeys(NAMES, 0.0))
    matrix, target = [], []
    for row in rows:
        base = row.predict(nothing)
        each = [row.predict(Local(**{**vars(nothing), name: 1.0})) for name in NAMES]
        for phase, seconds in row.phases.items():
            matrix.append([(one[phase] - base[phase]) / seconds / NOISE for one in each])
            target.append((seconds - base[phase]) / seconds / NOISE)
    for index, name in enumerate(NAMES):
        matrix.append([float(index == other) / getattr(PRIOR, name) for other in range(len(NAMES))])
        target.append(1.0)
    found = np.linalg.lstsq(np.array(matrix), np.array(target), rcond=None)[0]
    return Local(*(max(float(value), 0.0) for value in found))


def fitted_without(rows: Sequence[Row], size: str | None) -> Local:
    """Constants from the runs in FP32 of all models but one, or of all."""
    return fit([row for row in rows if row.size != size and row.precision == "float32"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measure", nargs="*", metavar="SIZE", help="run these sizes, or all")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fit", action="store_true", help="print the constants")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child, options.precision)))
        return
    if options.measure is not None:
        for size in options.measure or SIZES:
            command = [sys.executable, "-W", "ignore", __file__, "--precision", options.precision]
            output = subprocess.check_output([*command, "--child", size], text=True)
            with FILE.open("a") as file:  # as they come: the large ones take minutes
                file.write(output.splitlines()[-1] + "\n")
    rows = read_rows()
    if options.fit:
        for name, value in vars(fitted_without(rows, None)).items():
            print(f"    {name}: float = {value:.3g}")
        return
    show(rows)


def seen_by_size(rows: Sequence[Row]) -> Seen:
    """Errors of steps, each model predicted without itself."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        predicted = sum(row.predict(fitted_without(rows, row.size)).values())
        ratios.setdefault(row.size, []).append(sum(row.phases.values()) / predicted)
    return seen_of("", ratios)


def show(rows: Sequence[Row]) -> None:
    """The table, and the errors of steps."""
    print("| hidden x layers | precision | phase | measured s | predicted s | error | fitted on all |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        without, whole = row.predict(fitted_without(rows, row.size)), row.predict(LOCAL)
        measured = row.phases | {"step": sum(row.phases.values())}
        for found in (without, whole):
            found["step"] = sum(found.values())
        for phase, seconds in measured.items():
            shown = f"{seconds:.3g} | {without[phase]:.3g} | {without[phase] / seconds - 1:+.0%}"
            print(f"| {row.size} | {row.precision} | {phase} | {shown} | {whole[phase] / seconds - 1:+.0%} |")
    seen = seen_by_size(rows)
    print(f"\n{len(rows)} steps, median error {seen.median:.0%}, worst {seen.worst:.0%}")
    print(f"interval {seen.low:.3g} to {seen.high:.3g}, which covers {seen.covered:.3g}")


if __name__ == "__main__":
    main()
