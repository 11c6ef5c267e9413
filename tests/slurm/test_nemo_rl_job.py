"""slurm/pipeline.sh with NeMo-RL's own stack as its driver: two of three nodes, two nodes lost on the way.

NeMo-RL's trainer, policy and rollout workers, megatron-core, Megatron-Bridge and Ray are real; what a GPU
host has and this machine lacks is replaced as in `nemo-grpo rehearse`, and transformers samples for vLLM.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cluster import ROOT
from jobs import submit, submit_pipeline
from safetensors.torch import load_file
from torch.testing import assert_close

from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.support.errors import UserError

MINUTE = 60
PATIENCE = 20 * MINUTE
"""For one start of NeMo-RL on a busy machine of two cores; 1 to 3 minutes on a quiet one."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE)]

RECIPE = ROOT / "recipes/cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml"
"""Data parallel alone, so that each of the two nodes has a rank; its learning rate decays."""
STEPS = 6
OVERRIDES = ("cluster.num_nodes=2", "cluster.gpus_per_node=1")
OVERRIDES += ("grpo.max_num_steps=6", "checkpointing.save_period=2")
PER_NODE = {"RAY_CPUS": "12", "RAY_OBJECT_STORE_BYTES": "200000000"}
"""Actors of NeMo-RL's that want a CPU each, and no more memory than they need."""
PREPARE = """
import sys
from pathlib import Path
from nemo_grpo.rehearsal.environment import Stack
from nemo_grpo.rehearsal.stages import prepare
recipe, folder, nemo_rl = map(Path, sys.argv[1:])
prepare(recipe, [], Stack(Path(sys.executable), nemo_rl, None), folder, 2)
"""
"""Run by the Python with NeMo-RL's packages, whose transformers reads what is written."""
SAME = ("loss/total", "reward/mean", "grad_norm", "lr", "length/mean", "mismatch/kl")


@pytest.fixture(scope="module")
def small(slurm, tmp_path_factory):
    """The recipe made small, the options that make a job rehearse, and its folder."""
    if not slurm.has_namespaces:
        pytest.skip("namespaces are not allowed here, and two nodes of Ray need two addresses")
    try:
        stack = find_stack(None, None, None, sampler=True)
    except UserError as error:
        pytest.skip(f"make test-slurm-nemo-rl sets up what is missing: {error}")
    folder = tmp_path_factory.mktemp("nemo_rl") / "rehearsal"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [stack.python, "-W", "ignore", "-c", PREPARE, RECIPE, folder, stack.nemo_rl]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE)
    wanted = {**stack.environment(folder), **PER_NODE, "PYTHON": str(stack.python)}
    new = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    assert not any("," in value for value in new.values())
    exports = ",".join(f"{name}={value}" for name, value in new.items() if not name.startswith("RAY_AUTH"))
    options = (f"--export=ALL,{exports}", "--time=120", "--signal=B:USR1@60")
    return SimpleNamespace(recipe=folder / "recipe.yaml", options=options, folder=folder)


def trained(folder):
    """(step, metrics) of every update that the run's metrics.jsonl has, in the order of its lines."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(int(row["step"]), {name: row[name] for name in SAME}) for row in rows if "loss/total" in row]


@pytest.fixture(scope="module")
def unbroken(slurm, small):
    """The folder of a run of the same two-node job in which nothing fails, with its last checkpoint in hf."""
    name = "nemo_grpo.run_name=unbroken"
    line = ("--nodes=2", "--gpus-per-node=1", *small.options, str(small.recipe), *OVERRIDES, name)
    job = submit(slurm, small.folder, *line, name="unbroken")
    try:
        assert job.wait(2 * PATIENCE) == "COMPLETED", job.output[-5000:]
    finally:
        job.cancel()
    run = small.folder / "runs/unbroken"
    convert = [sys.executable, "-m", "checkpoints_conv", "megatron-to-hf", "--output", run / "hf"]
    convert += ["--megatron-checkpoint", run / f"checkpoints/step_{STEPS}"]
    convert += ["--hf-config", small.folder / "model"]
    subprocess.run(convert, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=PATIENCE)
    steps = [step for step, _ in trained(run)]
    assert steps == list(range(1, STEPS + 1))
    assert any(row["grad_norm"] for _, row in trained(run))  # else all runs would be equal
    return run


def test_run_that_loses_a_node_and_its_head_equals_an_uninterrupted_run(slurm, small, unbroken):
    run = small.folder / "runs/piped"
    training, conversion, evaluation = submit_pipeline(  # training alone rehearses
        *(slurm, small.folder, small.recipe, "piped", *OVERRIDES),
        TRAIN_OPTIONS=" ".join(small.options),
        PYTHON=sys.executable,
        OMP_NUM_THREADS="1",
    )

    def log(attempt):
        path = training.logs / f"attempt-{attempt}/driver.log"
        return path.read_text() if path.exists() else ""

    try:
        training.wait_for(lambda: log(0).count("Training policy...") == 4, PATIENCE, "step 4")
        assert training.field("NodeList") == "n[1-2]"
        slurm.power_off("n2")
        training.wait_for(lambda: training.field("Restarts") == "1", 3 * MINUTE, "a requeue")
        training.wait_for(lambda: log(1), 3 * MINUTE, "the second attempt")
        assert training.field("NodeList") == "n[1,3]"
        slurm.boot("n2")

        unfinished = run / "checkpoints/tmp_step_4"
        training.wait_for(unfinished.exists, PATIENCE, "a save of step 4")
        slurm.power_off("n1")
        assert unfinished.exists()
        training.wait_for(lambda: training.field("Restarts") == "2", 3 * MINUTE, "a second requeue")
        assert training.wait(2 * PATIENCE) == "COMPLETED"
        assert training.field("NodeList") == "n[2-3]"
        slurm.boot("n1")
        assert conversion.wait(PATIENCE) == "COMPLETED"
        assert evaluation.wait(PATIENCE) == "COMPLETED"
    finally:
        for job in (training, conversion, evaluation):
            job.cancel()

    for attempt, nodes in enumerate(("n1 n2", "n1 n3", "n2 n3")):
        assert f"attempt {attempt}] job {training.number} on {nodes}" in training.output
    last = training.attempts()[-1]  # those before it may have died with their node without a line
    assert [last[0], *last[2:]] == ["2", "finished", "0", "2", "6", "stop"]
    expected = dict(trained(unbroken))
    assert [step for step, _ in trained(run)] == [1, 2, 3, 3, 3, 4, 5, 6]
    assert [row for _, row in trained(run)] == [expected[step] for step, _ in trained(run)]

    weights = load_file(run / "hf-latest/model.safetensors")
    of_unbroken = load_file(unbroken / "hf/model.safetensors")
    assert (run / "hf-latest").readlink().name == f"hf-step_{STEPS}"
    assert_close(weights, of_unbroken, rtol=0, atol=0)
    summary = json.loads((run / "eval/recipe/summary.json").read_text())
    assert summary["model"].endswith("piped/hf-latest")
