"""The embedded engine under Slurm: a real time limit, and training, conversion and evaluation in a row."""

import importlib.metadata
import json
import sys

import pytest
from cluster import ROOT
from jobs import Job, submit, submit_pipeline
from processes import nemo_grpo, output_of
from safetensors.torch import load_file
from torch.testing import assert_close

MINUTE = 60
TINY = """
defaults: {root}/recipes/quickstart.yaml
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 40, val_period: 0}}
policy: {{train_micro_batch_size: 8, generation: {{max_new_tokens: 28}}}}
logger: {{tensorboard_enabled: false}}
checkpointing: {{save_period: 1000}}  # only at the end, and when the run is asked to stop
nemo_grpo:
  run_name: tiny
  runs_dir: {folder}
  rewards: {{format: 1.0, accuracy: 1.0}}
  evaluation: {{num_problems: 4, num_samples: 2}}
"""
ENVIRONMENT = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def recipe(folder):
    path = folder / "tiny.yaml"
    path.write_text(TINY.format(root=ROOT, folder=folder))
    return path


@pytest.fixture(scope="module")
def unbroken(folder, recipe):
    """The weights after a run outside Slurm."""
    output_of(nemo_grpo("train", recipe, "nemo_grpo.run_name=unbroken"))
    rows = [json.loads(line) for line in (folder / "unbroken/metrics.jsonl").read_text().splitlines()]
    assert any(row["advantage/abs_max"] > 0 for row in rows)  # else all weights would be equal
    return load_file(folder / "unbroken/hf/model.safetensors")


def test_run_requeued_at_its_time_limit_ends_with_the_weights_of_an_uninterrupted_run(
    slurm, folder, recipe, unbroken
):
    """It is held still after a few steps, and its limit then brought near, so that any machine meets it."""
    line = ("--nodelist=n3", "--time=20", "--signal=B:USR1@60", str(recipe), "nemo_grpo.run_name=requeued")
    job = submit(slurm, folder, *line, script="embedded.sbatch", name="requeued", **ENVIRONMENT)
    metrics = folder / "requeued/metrics.jsonl"
    job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 4 * MINUTE, "three steps")
    trainers = ("pkill", "-f", "^[^ ]*python[^ ]* -m nemo_grpo.cli train --resume .*=requeued$")
    slurm.run(*trainers, "-STOP", node="n3")
    minutes = int(job.field("RunTime").split(":")[1])
    slurm.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 2}")
    job.wait_for_output("SIGUSR1: the driver saves", 2 * MINUTE)
    slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=20")
    slurm.run(*trainers, "-CONT", node="n3")
    assert job.wait(4 * MINUTE) == "COMPLETED"

    first, second = job.attempts()
    assert first[2:4] + first[6:] == ["time limit", "75", "retry"]
    assert 3 <= int(first[5]) < 40
    assert second[2:6] == ["finished", "0", first[5], "40"]
    assert_close(load_file(folder / "requeued/hf/model.safetensors"), unbroken, rtol=0, atol=0)


def test_pipeline_trains_converts_and_evaluates(slurm, folder, recipe, unbroken):
    options = {"TRAIN_OPTIONS": "--time=10 --signal=B:USR1@60", **ENVIRONMENT}
    training, _, evaluation = submit_pipeline(slurm, folder, recipe, "piped", **options)
    assert evaluation.wait(5 * MINUTE) == "COMPLETED"
    assert training.state == "COMPLETED"
    assert (folder / "piped/hf-latest").readlink().name == "hf-step_000040"
    assert_close(load_file(folder / "piped/hf-latest/model.safetensors"), unbroken, rtol=0, atol=0)
    summary = json.loads((folder / "piped/eval/recipe/summary.json").read_text())
    assert summary["model"].endswith("piped/hf-latest")


def test_tasks_of_an_array_train_their_own_recipes_and_are_requeued_alone(slurm, folder, recipe):
    """The last task has the array's number, by which Slurm would mean both."""
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(f"defaults: {recipe}\nnemo_grpo: {{run_name: {name}}}\n")
    (folder / "list.txt").write_text(f"{folder}/one.yaml\n{folder}/two.yaml\n")
    line = ("--array=0-1", "--time=20", "--signal=B:USR1@60", str(folder / "list.txt"))
    array = submit(slurm, folder, *line, script="embedded.sbatch", name="both", **ENVIRONMENT)
    metrics = folder / "two/metrics.jsonl"
    array.wait_for(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 4 * MINUTE, "three steps"
    )
    slurm.run("scancel", "--batch", "--signal=USR1", f"{array.number}_1")

    def attempts(name):
        tables = list((folder / "logs" / name).glob("*/attempts.tsv"))
        return [row.split("\t")[2] for table in tables for row in table.read_text().splitlines()]

    def have_finished():
        return all("finished" in attempts(name) for name in ("one", "two"))

    array.wait_for(have_finished, 5 * MINUTE, "both runs")
    assert attempts("one") == ["finished"]
    assert attempts("two") == ["time limit", "finished"]


def test_stages_after_a_failed_training_are_dropped(slurm, folder, recipe):
    options = {"TRAIN_OPTIONS": "--time=10 --nodelist=n1 --export=ALL,PYTHON=false", **ENVIRONMENT}
    training, _, evaluation = submit_pipeline(slurm, folder, recipe, "wrong", **options)
    assert training.wait(MINUTE) == "FAILED"
    assert training.exit_code == 69
    assert evaluation.wait(MINUTE) == "CANCELLED"


def ranks_job(slurm, folder, recipe, name, hesitation, **environment):
    """A job of two ranks whose Python may be delayed or broken by a line of shell.

    The ranks are processes on CPUs, which gloo joins: srun, script and messages are tested, nccl is not.
    """
    python = folder / f"{name}-python"
    python.write_text(f'#!/bin/bash\n{hesitation}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    overrides = ("cluster.gpus_per_node=2", "grpo.max_num_steps=1", f"nemo_grpo.run_name={name}")
    line = ("--gpus-per-node=2", "--time=20", "--signal=B:USR1@60", str(recipe), *overrides)
    environment = ENVIRONMENT | {"PYTHON": str(python), "MAX_RETRIES": "0"} | environment
    return submit(slurm, folder, *line, script="embedded.sbatch", name=name, **environment)


def test_ranks_sum_a_one_each_before_the_training(slurm, folder, recipe):
    job = ranks_job(slurm, folder, recipe, "healthy", "")
    assert job.wait(4 * MINUTE) == "COMPLETED"
    before_training = job.output.split("driver:")[0]
    assert "all-reduce  2 ranks on n" in before_training
    assert ", gloo\n" in before_training
    reports = [json.loads(path.read_text()) for path in (job.logs / "attempt-0/ranks").glob("*.json")]
    assert sorted(report["rank"] for report in reports) == [0, 1]


def test_rank_that_does_not_answer_ends_the_job_by_its_name(slurm, folder, recipe):
    """The limit is short for two ranks that import torch on a busy machine, and rank 1 never starts."""
    hangs = "if [[ $SLURM_PROCID = 1 && $* = *rank_process* ]]; then echo 'waits for ever'; sleep 1000; fi"
    job = ranks_job(slurm, folder, recipe, "mute", hangs, PREFLIGHT_SECONDS="40")
    assert job.wait(3 * MINUTE) == "FAILED"
    assert job.exit_code == 69
    assert f"rank 1 on {job.field('NodeList')} did not answer: ended at start" in job.output
    assert "1: waits for ever" in job.output
    assert "driver:" not in job.output


def test_module_that_cannot_be_imported_ends_the_job_by_its_version(slurm, folder, recipe):
    broken = folder / "broken"
    broken.mkdir()
    (broken / "megatron.py").write_text("raise OSError('libcudart.so.12: no such file')\n")
    breaks = f"if [[ $SLURM_PROCID = 1 && $* = *rank_process* ]]; then export PYTHONPATH={broken}; fi"
    job = ranks_job(slurm, folder, recipe, "broken", breaks)
    assert job.wait(3 * MINUTE) == "FAILED"
    assert job.exit_code == 69
    version = importlib.metadata.version("megatron-core")
    assert f"megatron.core (megatron-core {version}) cannot be imported: OSError: libcudart" in job.output
    assert f"rank 1 on {job.field('NodeList')}: megatron.core" in job.output


def test_launch_submits_and_status_follows_the_run(slurm, folder, recipe):
    def launch(*arguments):
        command = (sys.executable, "-m", "nemo_grpo.cli", "launch", *map(str, arguments))
        return slurm.run(*command, cwd=folder, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1").stdout

    overrides = ("nemo_grpo.run_name=launched", "grpo.max_num_steps=2")
    said = launch(recipe, "--time", "10", "--partition", "main", *overrides)
    job = Job(slurm, folder, said.split()[1], "launched")
    assert said.startswith(f"job {job.number} (launched)\n")
    assert job.wait(3 * MINUTE) == "COMPLETED"
    said = launch("status", "launched")
    assert said.startswith(f"job {job.number}: JobState COMPLETED")
    assert "attempt 0, ended" in said
    assert "finished, exit code 0, checkpoints 0 -> 2, stop" in said
    assert "newest checkpoint: step 2" in said
