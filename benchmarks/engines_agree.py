"""Differences between the two engines on the same recipe, weights and responses, number by number.

    NEMO_RL_SRC=DIR .venv-nemo-rl/bin/python -m benchmarks.engines_agree [--variants grpo,erpo]
        [--layouts TP1,TP2,DP2] [--precisions float32,bfloat16] [--drift 12] [--folder DIR] [--output FILE.md]

NeMo-RL's policy, worker group and Megatron workers run as in a rehearsal (`nemo_grpo.rehearsal`), with our
estimator and loss; the embedded engine runs in the same environment, so that both have one megatron-core.
Responses are sampled once. Three steps: one update, then two with two updates each, so that ratios, the KL
and the optimizer's state depend on earlier updates.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.agreement.comparison import Differences, compare, drift_table, table
from benchmarks.agreement.recording import LAYOUTS, VARIANTS, Case, StepResult, record
from nemo_grpo.engine.launch import reserved_port
from nemo_grpo.rehearsal.cluster import ray_cluster
from nemo_grpo.rehearsal.environment import Stack, find_stack

ROOT = Path(__file__).parents[1]
Results = dict[Case, list[StepResult]]
TIMEOUT = 3000


def main(argv: Sequence[str] | None = None) -> int:
    """Run both engines and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--precisions", default="float32,bfloat16")
    parser.add_argument("--drift", type=int, default=0, metavar="STEPS", help="also GRPO, for STEPS steps")
    parser.add_argument("--folder", type=Path, help="keeps what is recorded; default: a temporary one")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(argv)
    stack = sides_stack()
    cases = [
        Case(variant, layout, precision)
        for layout in given.layouts.split(",")
        for precision in given.precisions.split(",")
        for variant in given.variants.split(",")
    ]
    long = [Case("grpo", "TP1", p, (2,) * given.drift) for p in ("float32", "bfloat16") if given.drift]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        embedded, cluster = run(stack, folder, cases + long)
    text = report(embedded, cluster, cases, long)
    print(text)
    if given.output:
        given.output.write_text(text)
    return 0


def sides_stack() -> Stack:
    """Find NEMO_RL_SRC and this Python, for both sides; nothing samples."""
    return replace(find_stack(None, Path(sys.executable), None), vllm_python=None)


def run(stack: Stack, folder: Path, cases: list[Case]) -> tuple[Results, Results]:
    """Run both engines; ``folder`` keeps the results, so that an interrupted run continues."""
    if not (folder / "batches.pt").exists():
        record(stack, folder)
    cases = sorted(cases, key=lambda case: (case.layout, case.precision))
    embedded = read(kept := folder / "embedded-all.pt")
    for layout in sorted({case.layout for case in cases}):
        if left := [case for case in cases if case.layout == layout and case not in embedded]:
            embedded |= run_embedded(stack, folder, left)
            torch.save(embedded, kept)
    cluster = read(folder / "cluster.pt") | read(kept := folder / "cluster-all.pt")
    torch.save(cluster, kept)
    if left := [case for case in cases if case not in cluster]:
        cluster |= run_cluster(stack, folder, left)
        torch.save(cluster, kept)
    return embedded, cluster


def run_embedded(stack: Stack, folder: Path, cases: list[Case]) -> Results:
    """Run the cases of one layout, a process per rank."""
    torch.save(cases, folder / "cases.pt")
    output, ranks = folder / "embedded.pt", LAYOUTS[cases[0].layout]["ranks"]
    shared = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(ranks),
    }
    command = [str(stack.python), "-W", "ignore", "-m", "benchmarks.agreement.embedded"]
    command += [str(folder), str(output)]
    with reserved_port() as port:
        shared["MASTER_PORT"] = str(port)
        started = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
    try:
        codes = [process.wait(TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the embedded engine ended with {codes}")
    return read(output)


def run_cluster(stack: Stack, folder: Path, cases: list[Case]) -> Results:
    """Run all cases in a Ray with as many logical GPUs as the widest layout."""
    torch.save(cases, folder / "cases.pt")
    output, log = folder / "cluster.pt", folder / "cluster.log"
    output.unlink(missing_ok=True)
    command = [str(stack.python), "-W", "ignore", "-m", "benchmarks.agreement.cluster"]
    command += [str(folder), str(output)]
    ranks = max(LAYOUTS[case.layout]["ranks"] for case in cases)
    with ray_cluster(stack, folder, ranks) as ray, log.open("wb") as out:
        done = subprocess.run(
            command, env=ray.environment, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
        )
    if done.returncode:
        raise RuntimeError(f"NeMo-RL's side ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return read(output)


def read(path: Path) -> Results:
    """Read the results of one side; none without a file."""
    found: Results = torch.load(path, weights_only=False) if path.exists() else {}
    return found


def report(embedded: Results, cluster: Results, cases: list[Case], long: list[Case]) -> str:
    """Write Markdown: a table per precision, and the drift."""
    parts = [
        "# The engines agree",
        f"`benchmarks/engines_agree.py`, {platform.machine()}, torch {torch.__version__}, "
        f"megatron-core {version('megatron-core')}, Megatron-Bridge {version('megatron-bridge')}; "
        f"NeMo-RL: {Path(os.environ['NEMO_RL_SRC']).name}.",
    ]
    for precision in dict.fromkeys(case.precision for case in cases):
        rows: dict[tuple[str, str], Differences] = {
            (case.variant, case.layout): compare(embedded[case], cluster[case])
            for case in cases
            if case.precision == precision
        }
        parts += [f"## {precision}", table(rows)]
    if long:
        parts += ["## Drift", drift_table(*[(embedded[case], cluster[case]) for case in long])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
