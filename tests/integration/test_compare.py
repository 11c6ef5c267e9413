"""A comparison of real runs that is killed without warning, and continued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_val_samples=2",
    "grpo.val_num_generations_per_prompt=1",
    "grpo.val_period=0",
    "policy.train_micro_batch_size=4",
    "policy.generation.max_new_tokens=8",
    "checkpointing.save_period=1",
    "logger.tensorboard_enabled=false",
    "nemo_grpo.warm_start.num_steps=2",
)
LONG = "grpo.max_num_steps=100000"
SECONDS = 250


def compare(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nemo_grpo.cli", "compare", str(ROOT / "recipes/quickstart.yaml")]
    command += ["--variants", "grpo", "--seeds", "1", "--out", str(folder / "out"), *TINY]
    command += [f"nemo_grpo.warm_start.cache_dir={folder / 'cache'}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_comparison_takes_its_runs_with_it_and_is_continued(tmp_path: Path) -> None:
    run = tmp_path / "out" / "runs" / "grpo-s0"
    first = compare(tmp_path, LONG)
    wait_for(lambda: any(run.glob("checkpoints/step_*")), first)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=SECONDS)  # to the end of its output, which the run does not hold open
    end = time.monotonic() + SECONDS
    while "add --resume to continue" not in (tmp_path / "out" / "logs" / "grpo-s0.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    stopped_at = len((run / "metrics.jsonl").read_text().splitlines()) - 1

    steps = stopped_at + 2
    second = compare(tmp_path, f"grpo.max_num_steps={steps}")
    output = second.communicate(timeout=SECONDS)[0]
    assert second.returncode == 0, output
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(steps + 1))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"][0]["steps"] == [steps]
    assert (tmp_path / "out" / "report.html").is_file()
