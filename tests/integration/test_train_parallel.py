"""Whole runs on several ranks: the same training as on one, checkpoints for any layout, one exit for all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_train import ROOT, arguments, rows

from nemo_grpo import UserError
from nemo_grpo.engine.signals import EXIT_INTERRUPTED
from nemo_grpo.engine.trainer import Trainer, check
from nemo_grpo.recipe import load_recipe

STEPS = ["grpo.max_num_steps=2", "grpo.val_period=0", "policy.train_micro_batch_size=2"]
TP2_PP2 = [
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "cluster.gpus_per_node=4",
]
DP2 = ["cluster.gpus_per_node=2"]
CP2 = ["policy.megatron_cfg.context_parallel_size=2", "cluster.gpus_per_node=2"]


def train(overrides: list[str], resume: bool = False) -> dict[str, torch.Tensor]:
    trainer = Trainer(load_recipe(ROOT / "recipes/quickstart.yaml", overrides), resume=resume)
    trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.policy.named_tensors()}


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        pytest.param(DP2, 2, id="dp2", marks=pytest.mark.slow),
        pytest.param(CP2, 2, id="cp2", marks=pytest.mark.slow),
        pytest.param(TP2_PP2, 4, id="tp2-pp2"),
    ],
)
def test_training_is_the_same_on_several_ranks(tmp_path, cache, layout, num_ranks):
    alone = run_ranks(1, train, [*arguments(tmp_path, cache, "alone"), *STEPS])[0]
    parallel = run_ranks(num_ranks, train, [*arguments(tmp_path, cache, "parallel"), *STEPS, *layout])
    for weights in parallel:
        for name, tensor in alone.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=2e-4, msg=name)
    one, several = rows(tmp_path / "alone")[1], rows(tmp_path / "parallel")[1]
    for key in ("reward/mean", "length/mean", "entropy/mean", "loss/total", "grad_norm"):
        assert several[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_a_checkpoint_resumes_at_another_layout(tmp_path, cache):
    longer = [*STEPS, "grpo.max_num_steps=4", "policy.megatron_cfg.scheduler.lr_decay_style=constant"]
    shorter = [*longer, "grpo.max_num_steps=2"]
    unbroken = run_ranks(1, train, [*arguments(tmp_path, cache, "whole"), *longer])[0]
    run_ranks(4, train, [*arguments(tmp_path, cache, "moved"), *shorter, *TP2_PP2])
    moved = run_ranks(1, train, [*arguments(tmp_path, cache, "moved"), *longer], True)[0]
    back = run_ranks(
        2, train, [*arguments(tmp_path, cache, "moved"), *longer, "grpo.max_num_steps=5", *DP2], True
    )[0]
    for name, tensor in unbroken.items():
        torch.testing.assert_close(moved[name], tensor, rtol=1e-3, atol=5e-4, msg=name)
    assert any(not torch.equal(back[name], tensor) for name, tensor in moved.items())
    assert [row["step"] for row in rows(tmp_path / "moved")] == [0, 1, 2, 3, 4, 5]


def command(tmp_path: Path, cache: Path, *extra: str) -> tuple[list[str], dict[str, str]]:
    line = [sys.executable, "-m", "nemo_grpo.cli", "train", str(ROOT / "recipes/quickstart.yaml")]
    return [*line, *arguments(tmp_path, cache, "cli"), *extra], {**os.environ, "PYTHONPATH": str(ROOT)}


def started(tmp_path: Path, cache: Path, *extra: str) -> subprocess.Popen[str]:
    """The command line on two ranks, returned once it has trained three steps."""
    line, environment = command(tmp_path, cache, "grpo.max_num_steps=500", "grpo.val_period=0", *DP2, *extra)
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "cli/metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.slow
def test_the_command_starts_the_ranks_and_sigterm_ends_them_with_a_checkpoint(tmp_path, cache):
    process = started(tmp_path, cache)
    assert len(ranks_of(process)) == 2
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, error
    assert re.search(r"validation responses of rank 0 of 2 (\d+)/\1, \d+ s, \d+ tokens/s, ", error), error
    last = rows(tmp_path / "cli")[-1]["step"]
    line, environment = command(
        tmp_path, cache, f"grpo.max_num_steps={last + 1}", "grpo.val_period=0", "--resume"
    )
    subprocess.run(line, env=environment, check=True, capture_output=True, timeout=240)  # on one rank
    assert load_file(tmp_path / "cli/hf/model.safetensors")


@pytest.mark.slow
def test_a_dead_rank_ends_the_job(tmp_path, cache):
    process = started(tmp_path, cache)
    victim = ranks_of(process)[1]
    os.kill(victim, signal.SIGKILL)
    _, error = process.communicate(timeout=240)  # a collective would wait for ten minutes
    assert process.returncode not in (0, EXIT_INTERRUPTED)
    assert re.search(r"rank \d ended with exit code (-9|1); ending the others", error), error[-2000:]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy.megatron_cfg.tensor_model_parallel_size=3", "cluster.gpus_per_node=3"],
            "num_key_value_heads=2",
        ),
        (
            ["policy.megatron_cfg.tensor_model_parallel_size=4", "cluster.gpus_per_node=4"],
            "num_key_value_heads=2",
        ),
        (
            ["policy.megatron_cfg.pipeline_model_parallel_size=4", "cluster.gpus_per_node=4"],
            "num_hidden_layers=2",
        ),
        (
            ["policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=3"],
            "multiple",
        ),
    ],
)
def test_layouts_that_do_not_divide_are_refused_before_anything_starts(tmp_path, cache, overrides, message):
    line = arguments(tmp_path, cache, "run")
    with pytest.raises(UserError, match=message):
        check(load_recipe(ROOT / "recipes/quickstart.yaml", line + overrides), resume=False)
    assert not (tmp_path / "run").exists()
