"""The embedded engine under Slurm: a real time limit, and training, conversion and evaluation in a row."""

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
