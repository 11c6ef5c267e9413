"""The processes of a run's ranks, which a small program stands for."""

import sys

import pytest

from nemo_grpo.engine import launch as module
from nemo_grpo.engine.launch import launch

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "KEPT")


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Ranks that run these lines of a shell, after one that tells what they were started with."""

    def start(lines: str, num_ranks: int) -> int:
        program = tmp_path / "program"
        told = " ".join(f"${name}" for name in NAMES)
        program.write_text(f'#!/bin/sh\necho "{told} $*" > {tmp_path}/rank$RANK\n{lines}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return launch(["train", "recipe.yaml"], num_ranks)

    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # of this process alone
    return start


def test_every_rank_knows_its_number_and_where_to_meet(ranks, tmp_path):
    assert ranks("", 3) == 0
    told = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(3)]
    port = told[0][4]
    assert 1024 <= int(port) < 65536
    assert told == [
        f"{rank} {rank} 3 127.0.0.1 {port} 1 kept -m nemo_grpo.cli train recipe.yaml".split()
        for rank in range(3)
    ]


def test_a_rank_that_fails_ends_the_others_and_gives_the_exit_code(ranks, monkeypatch, caplog):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    assert ranks('[ "$RANK" = 1 ] && exit 7\nexec sleep 3000', 2) == 7
    assert "rank 1 ended (exit code 7); ending the others" in caplog.text


@pytest.mark.parametrize(("number", "code"), [("USR1", 138), ("TERM", 143), ("KILL", 137)])
def test_a_rank_that_a_signal_ends_gives_the_code_of_a_shell(ranks, number, code):
    assert ranks(f"kill -{number} $$", 1) == code
