"""Parts of a rehearsal that are killed by SIGKILL: it ends with the cause, and the next start goes on.

Real: NeMo-RL, Ray, MegatronPolicyWorker. The stand-in samples, since vLLM's random state does not survive a
restart. A rehearsal with a checkpoint after every step, without the stop.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM  # noqa: F401  # sets variables when it is imported

from nemo_grpo.rehearsal import stages
from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.rehearsal.run_output import Recorded

RECIPE = Path(__file__).parents[2] / "recipes" / "cw_grpo" / "grpo-r1-distill-qwen-1.5b-1n8g.yaml"
OVERRIDES = ("cluster.gpus_per_node=1",)
SAME = ("loss/total", "grad_norm", "reward/mean", "lr", "logprob/mean", "mismatch/kl")
MINUTE = 60.0

ROLLOUT = "Generating responses for batch of size"
TRAINING = "Training policy..."
SAVING = "Saving checkpoint for step 2"
VICTIMS = {
    "driver while saving": ("nemo_grpo.nemorl.run_grpo", SAVING, "killed by SIGKILL"),
    "policy worker in an update": ("ray::MegatronPolicyWorker", TRAINING, "ActorDiedError|ActorUnavailable"),
    "policy worker while saving": ("ray::MegatronPolicyWorker", SAVING, "ActorDiedError|ActorUnavailable"),
    "rollout worker in a rollout": ("ray::VllmGenerationWorker", ROLLOUT, "actor died unexpectedly"),
    "Ray's head in a rollout": ("gcs_server", ROLLOUT, "Ray ended"),
    "raylet in an update": ("raylet/raylet", TRAINING, "Ray ended"),
}
"""Part -> (in its command line, the driver's message before it is killed, the cause that must be named)."""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    stack = find_stack(None, Path(sys.executable), None, sampler=True)
    return stages.prepare(RECIPE, OVERRIDES, stack, tmp_path_factory.mktemp("killed") / "run", 1)


@pytest.fixture(scope="module")
def unbroken(rehearsal):
    stages.train(rehearsal, stops=False)
    return Recorded(rehearsal).steps


def processes(part):
    """Living processes of this test's rehearsals whose command line names the part."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if part in line and f"NEMO_GRPO_REHEARSAL={os.getpid()}".encode() in environment:
            yield int(process.name)


def wait_for(message, log, number, training):
    while not log.exists() or log.read_text(errors="replace").count(message) < number:
        assert training.is_alive(), f"it ended before {message!r}: {stages.tail(log)}"
        time.sleep(0.01)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("part", "message", "cause"), VICTIMS.values(), ids=VICTIMS)
def test_killed_part_ends_the_run_with_its_cause_and_the_next_start_goes_on(
    rehearsal, unbroken, part, message, cause
):
    log, ends = rehearsal.folder / "driver-2.log", list[str]()
    shutil.rmtree(rehearsal.folder / "runs")
    log.unlink()

    def train():
        try:
            stages.train(rehearsal, stops=False)
        except stages.Failed as failed:
            ends.append(str(failed))

    training = threading.Thread(target=train)
    training.start()
    wait_for(message, log, 1 if message == SAVING else 2, training)
    for pid in processes(part):
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    training.join()
    assert ends, "the run failed"
    assert any(word in ends[0] for word in cause.split("|")), ends[0]
    while left := list(processes("")):
        assert time.monotonic() - killed < MINUTE, f"left behind: {left}"
        time.sleep(0.1)
    assert time.monotonic() - killed < MINUTE

    stages.train(rehearsal, stops=False)
    assert log.read_text(errors="replace").count(TRAINING) < 3, "it went on from a checkpoint"
    steps = Recorded(rehearsal).steps
    assert sorted(steps) == sorted(unbroken)
    for step, name in ((step, name) for step in steps for name in SAME):
        assert steps[step][name] == pytest.approx(unbroken[step][name], rel=1e-6, abs=1e-9), (step, name)
