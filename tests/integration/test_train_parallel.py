"""Whole runs on several ranks: the same training as on one, checkpoints for any layout, one exit for all."""

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from processes import nemo_grpo, output_of, wait_for
from ranks import run_ranks
from safetensors.torch import load_file
from small_runs import (
    AT_THE_ENDS,
    DP2,
    QUICKSTART,
    TP2_PP2,
    arguments,
    assert_same_rows,
    has_trained,
    rows,
    weights_after,
)

from nemo_grpo.run.signals import EXIT_INTERRUPTED

STEPS = ["grpo.max_num_steps=2", *AT_THE_ENDS, "policy.train_micro_batch_size=2"]


def test_training_is_the_same_on_several_ranks(tmp_path):
    alone = run_ranks(1, weights_after, arguments(tmp_path, "alone", *STEPS))[0]
    for weights in run_ranks(4, weights_after, arguments(tmp_path, "four", *STEPS, *TP2_PP2)):
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=2e-4)
    keys = ("reward/mean", "length/mean", "entropy/mean", "loss/total", "grad_norm")
    assert_same_rows(tmp_path / "alone", tmp_path / "four", *keys)


@pytest.mark.slow
def test_a_checkpoint_resumes_at_another_layout(tmp_path):
    longer = [*STEPS, "grpo.max_num_steps=4", "policy.megatron_cfg.scheduler.lr_decay_style=constant"]
    unbroken = run_ranks(1, weights_after, arguments(tmp_path, "whole", *longer))[0]
    line = arguments(tmp_path, "moved", *longer)
    run_ranks(4, weights_after, [*line, "grpo.max_num_steps=2", *TP2_PP2])
    moved = run_ranks(1, weights_after, line, resume=True)[0]
    back = run_ranks(2, weights_after, [*line, "grpo.max_num_steps=5", *DP2], resume=True)[0]
    torch.testing.assert_close(moved, unbroken, rtol=1e-3, atol=5e-4)
    assert any(not torch.equal(back[name], tensor) for name, tensor in moved.items())
    assert [row["step"] for row in rows(tmp_path / "moved")] == [0, 1, 2, 3, 4, 5]


def command(tmp_path: Path, *extra: str) -> subprocess.Popen[str]:
    line = arguments(tmp_path, "cli", *AT_THE_ENDS, *extra)
    return nemo_grpo("train", QUICKSTART, *line)


@pytest.mark.slow
def test_the_command_starts_the_ranks_and_sigterm_ends_them_with_a_checkpoint(tmp_path):
    training = command(tmp_path, "grpo.max_num_steps=500", *DP2)
    wait_for(lambda: has_trained(tmp_path / "cli", 3), training)
    assert len(psutil.Process(training.pid).children()) == 2
    training.send_signal(signal.SIGTERM)
    said = output_of(training, EXIT_INTERRUPTED)
    assert re.search(r"validation responses of rank 0 of 2 (\d+)/\1, \d+ s, \d+ tokens/s, ", said), said
    last = rows(tmp_path / "cli")[-1]["step"]
    output_of(command(tmp_path, f"grpo.max_num_steps={last + 1}", "--resume"))  # on one rank
    assert load_file(tmp_path / "cli/hf/model.safetensors")
