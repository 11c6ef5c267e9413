"""Runs and comparisons that are killed again and again end like unbroken ones."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT, nemo_grpo, output_of, wait_for
from safetensors.numpy import load_file
from small_runs import AT_THE_ENDS, QUICKSTART, arguments, has_trained, lines_of, rows, without_time

from nemo_grpo.engine.checkpoint_store import CheckpointStore, read_info

LONG = ["grpo.max_num_steps=12", "grpo.val_period=4", "checkpointing.save_period=1"]
RUNS = {
    "sync": (QUICKSTART, []),
    "async": (QUICKSTART, ["policy.megatron_cfg.checkpoint.async_save=true"]),
    "supervised": (
        ROOT / "recipes/quickstart-sft.yaml",
        ["grpo.num_generations_per_prompt=1", "policy.train_micro_batch_size=4"],
    ),
}
NUM_KILLS = 4
pytestmark = pytest.mark.slow


def kill(process, run: Path, draw: random.Random, *, in_save: bool) -> bool:
    """Kill some steps later, or while a checkpoint is being written. Returns: whether one was."""
    metrics = run / "metrics.jsonl"
    trained = metrics.read_text().count("\n") if metrics.exists() else 0
    stale = set(run.glob("checkpoints/tmp_step_*"))
    wait_for(lambda: has_trained(run, trained + 1), process)
    if in_save:
        wait_for(lambda: bool(set(run.glob("checkpoints/tmp_step_*")) - stale), process)
    else:
        time.sleep(draw.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return bool(set(run.glob("checkpoints/tmp_step_*")) - stale)


def newest_step(run: Path) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    newest = CheckpointStore(run / "checkpoints").latest()
    return int(read_info(newest)["step"]) if newest else 0


@pytest.mark.parametrize("name", RUNS)
def test_killed_run_ends_bit_equal_to_an_unbroken_one(tmp_path, name):
    recipe, more = RUNS[name]
    draw, options = random.Random(1), [*LONG, *more]
    whole, broken = (arguments(tmp_path, name, *options) for name in ("whole", "broken"))
    output_of(nemo_grpo("train", recipe, *whole))
    run, newest, inside = tmp_path / "broken", 0, 0
    for number in range(NUM_KILLS):
        resume = ["--resume"] if run.exists() else []
        process = nemo_grpo("train", recipe, *broken, *resume)
        inside += kill(process, run, draw, in_save=number % 2 == 0)
        older, newest = newest, newest_step(run)
        assert newest >= older
    output_of(nemo_grpo("train", recipe, *broken, "--resume"))
    assert inside > 0
    weights, expected = (load_file(tmp_path / name / "hf/model.safetensors") for name in ("broken", "whole"))
    assert {k: v.tobytes() for k, v in weights.items()} == {k: v.tobytes() for k, v in expected.items()}
    assert without_time(run) == without_time(tmp_path / "whole")
    if name != "supervised":
        assert lines_of(run / "samples.jsonl") == lines_of(tmp_path / "whole" / "samples.jsonl")
    assert not list(run.rglob("tmp_*"))


SHORT = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_val_samples=2",
    "grpo.val_num_generations_per_prompt=1",
    *AT_THE_ENDS,
    "policy.train_micro_batch_size=4",
    "policy.generation.max_new_tokens=8",
    "checkpointing.save_period=1",
    "logger.tensorboard_enabled=false",
    "grpo.max_num_steps=40",
)


def compare(folder: Path) -> subprocess.Popen[str]:
    line = [
        "compare",
        QUICKSTART,
        "--variants",
        "grpo",
        "--seeds",
        "1",
        "--out",
        folder / "out",
        *SHORT,
    ]
    return nemo_grpo(*line)


def test_a_killed_comparison_takes_its_runs_with_it_and_is_continued(tmp_path):
    run = tmp_path / "out" / "runs" / "grpo-s0"
    first = compare(tmp_path)
    wait_for(lambda: any(run.glob("checkpoints/step_*")), first)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=PATIENCE)  # to the end of its output, which the run does not hold open
    log = tmp_path / "out" / "logs" / "grpo-s0.log"
    wait_for(lambda: "add --resume to continue" in log.read_text())
    assert rows(run)[-1]["step"] < 40
    output_of(compare(tmp_path))
    assert [row["step"] for row in rows(run)] == list(range(41))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"][0]["steps"] == [40]
    assert (tmp_path / "out" / "report.html").is_file()
