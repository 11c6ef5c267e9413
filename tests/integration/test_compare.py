"""A comparison of real runs that is killed without warning, and continued."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE, nemo_grpo, output_of, wait_for
from small_runs import AT_THE_ENDS, QUICKSTART, rows

TINY = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.max_val_samples=2",
    "grpo.val_num_generations_per_prompt=1",
    *AT_THE_ENDS,
    "policy.train_micro_batch_size=4",
    "policy.generation.max_new_tokens=8",
    "checkpointing.save_period=1",
    "logger.tensorboard_enabled=false",
    "nemo_grpo.warm_start.num_steps=2",
    "policy.megatron_cfg.scheduler.lr_decay_style=constant",  # else more steps are another training
)
LONG = "grpo.max_num_steps=100000"


def compare(folder: Path, steps: str) -> subprocess.Popen[str]:
    line = ["compare", QUICKSTART, "--variants", "grpo", "--seeds", "1", "--out", folder / "out", *TINY]
    return nemo_grpo(*line, f"nemo_grpo.warm_start.cache_dir={folder / 'cache'}", steps)


@pytest.mark.slow
def test_a_killed_comparison_takes_its_runs_with_it_and_is_continued(tmp_path: Path) -> None:
    run = tmp_path / "out" / "runs" / "grpo-s0"
    first = compare(tmp_path, LONG)
    wait_for(lambda: any(run.glob("checkpoints/step_*")), first)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=PATIENCE)  # to the end of its output, which the run does not hold open
    log = tmp_path / "out" / "logs" / "grpo-s0.log"
    wait_for(lambda: "add --resume to continue" in log.read_text())
    steps = rows(run)[-1]["step"] + 2
    output_of(compare(tmp_path, f"grpo.max_num_steps={steps}"))
    assert [row["step"] for row in rows(run)] == list(range(steps + 1))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"][0]["steps"] == [steps]
    assert (tmp_path / "out" / "report.html").is_file()
