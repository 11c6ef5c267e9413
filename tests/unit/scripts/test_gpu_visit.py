"""The visit to a GPU, rehearsed on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "scripts/gpu_visit.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the visit would be a real one")
def test_every_part_runs_without_a_gpu_and_leaves_its_figures(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "NEMO_RL_SRC"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "--dry-run"]
    subprocess.run(command, env=environment, check=False, capture_output=True)
    done = json.loads((tmp_path / "parts.json").read_text())
    no_gpu = ("update", "update-7b")
    assert {name: part["exit"] for name, part in done.items()} == {
        **dict.fromkeys(("ceilings", "tests", "killed", "steps"), 0),
        **dict.fromkeys(no_gpu, 2),
    }
    for name in no_gpu:
        assert "torch finds no CUDA device" in (tmp_path / f"{name}.txt").read_text()
    assert "skipped" in (tmp_path / "tests.txt").read_text()
    assert json.loads((tmp_path / "ceilings.json").read_text())["bf16_flops"] > 0
    killed = json.loads((tmp_path / "killed.json").read_text())
    assert killed["exit"] == 0
    assert killed["killed_at"] >= 2
    assert killed["steps"] == [0, 1, 2, 3, 4]  # each step once, in spite of the kill
    steps = json.loads((tmp_path / "steps.json").read_text())["quickstart"]
    assert steps["planned_bytes"]["training"] > 0
    assert all(seconds > 0 for seconds in steps["seconds"]["time/update"])
    assert steps["profile"]["learn_seconds"] > 0
