"""Differences between the two engines on the same recipe, weights and responses, number by number.

    NEMO_RL_SRC=DIR .venv-nemo-rl/bin/python -m benchmarks.engines_agree [--variants grpo,erpo]
        [--layouts TP1,TP2,DP2] [--precisions float32,bfloat16] [--drift 12] [--folder DIR] [--output FILE.md]

NeMo-RL's policy, worker group and Megatron workers run as in a rehearsal (`nemo_grpo.rehearsal`), with our
estimator and loss; the embedded engine runs in the same environment, so that both have one megatron-core.
Responses are sampled once. There are three steps: the first has one update, the others have two each, so that
ratios, the KL and the optimizer's state depend on earlier updates.
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
"""Seconds for one side."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both engines and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--precisions", default="float32,bfloat16")
    parser.add_argument("--drift", type=int, default=0, metavar="STEPS", help="also GRPO, for STEPS steps")
    parser.add_argument("--folder", type=Path, help="keeps what is recorded; default: a temporary one")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    stack = sides_stack()
    cases = [
        Case(variant, layout, precision)
        for layout in arguments.layouts.split(",")
        for precision in arguments.precisions.split(",")
        for variant in arguments.variants.split(",")
    ]
    drift_cases = []
    if arguments.drift:
        updates = (2,) * arguments.drift
        drift_cases = [Case("grpo", "TP1", precision, updates) for precision in ("float32", "bfloat16")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        embedded, cluster = run(stack, folder, cases + drift_cases)
    tables = report(embedded, cluster, cases, drift_cases)
    print(tables)
    if arguments.output:
        arguments.output.write_text(tables)
    return 0


def sides_stack() -> Stack:
    """Find the software of both sides: NEMO_RL_SRC and this Python; vLLM is not needed."""
    return replace(find_stack(None, Path(sys.executable), None), vllm_python=None)


def run(stack: Stack, folder: Path, cases: list[Case]) -> tuple[Results, Results]:
    """Run both engines; ``folder`` keeps the results, so that an interrupted run continues."""
    if not (folder / "batches.pt").exists():
        record(stack, folder)
    cases = sorted(cases, key=lambda case: (case.layout, case.precision))
    embedded_file = folder / "embedded-all.pt"
    embedded = read(embedded_file)
    for layout in sorted({case.layout for case in cases}):
        remaining_cases = [case for case in cases if case.layout == layout and case not in embedded]
        if remaining_cases:
            embedded |= run_embedded(stack, folder, remaining_cases)
            torch.save(embedded, embedded_file)
    cluster_file = folder / "cluster-all.pt"
    # An interrupted run of NeMo-RL's side leaves the cases that it has finished in cluster.pt.
    cluster = read(folder / "cluster.pt") | read(cluster_file)
    torch.save(cluster, cluster_file)
    remaining_cases = [case for case in cases if case not in cluster]
    if remaining_cases:
        cluster |= run_cluster(stack, folder, remaining_cases)
        torch.save(cluster, cluster_file)
    return embedded, cluster


def run_embedded(stack: Stack, folder: Path, cases: list[Case]) -> Results:
    """Run the cases of one layout, a process per rank."""
    torch.save(cases, folder / "cases.pt")
    output = folder / "embedded.pt"
    num_ranks = LAYOUTS[cases[0].layout]["ranks"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(num_ranks),
    }
    command = [str(stack.python), "-W", "ignore", "-m", "benchmarks.agreement.embedded"]
    command += [str(folder), str(output)]
    with reserved_port() as port:
        environment["MASTER_PORT"] = str(port)
        processes = []
        for rank in range(num_ranks):
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment | rank_variables))
    try:
        codes = [process.wait(TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the embedded engine ended with {codes}")
    return read(output)


def run_cluster(stack: Stack, folder: Path, cases: list[Case]) -> Results:
    """Run all cases in a Ray with as many logical GPUs as the widest layout."""
    torch.save(cases, folder / "cases.pt")
    output = folder / "cluster.pt"
    log = folder / "cluster.log"
    output.unlink(missing_ok=True)
    command = [str(stack.python), "-W", "ignore", "-m", "benchmarks.agreement.cluster"]
    command += [str(folder), str(output)]
    num_gpus = max(LAYOUTS[case.layout]["ranks"] for case in cases)
    with ray_cluster(stack, folder, num_gpus) as ray, log.open("wb") as out:
        process = subprocess.run(
            command, env=ray.environment, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
        )
    if process.returncode:
        raise RuntimeError(f"NeMo-RL's side ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return read(output)


def read(path: Path) -> Results:
    """Read the results of one side; {} if the file does not exist."""
    if not path.exists():
        return {}
    results: Results = torch.load(path, weights_only=False)
    return results


def report(embedded: Results, cluster: Results, cases: list[Case], drift_cases: list[Case]) -> str:
    """Write Markdown: a table per precision, and the drift over many steps."""
    parts = [
        "# The engines agree",
        f"`benchmarks/engines_agree.py`, {platform.machine()}, torch {torch.__version__}, "
        f"megatron-core {version('megatron-core')}, Megatron-Bridge {version('megatron-bridge')}; "
        f"NeMo-RL: {Path(os.environ['NEMO_RL_SRC']).name}.",
    ]
    for precision in dict.fromkeys(case.precision for case in cases):
        rows: dict[tuple[str, str], Differences] = {}
        for case in cases:
            if case.precision == precision:
                rows[case.variant, case.layout] = compare(embedded[case], cluster[case])
        parts += [f"## {precision}", table(rows)]
    if drift_cases:
        fp32, bf16 = ((embedded[case], cluster[case]) for case in drift_cases)
        parts += ["## Drift", drift_table(fp32, bf16)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
