"""Defects planted in recorded rehearsals (`record.py`): the stage that is about them must fail.

Recorded from real runs of NeMo-RL: metrics, responses, the model, the export. Megatron-Bridge's export, equal
to ours bit for bit in the recorded run, is a copy of ours.
"""

import shutil
from typing import Any

import pytest
from recordings import (
    RECORDINGS,
    drop_merge,
    export,
    files_of,
    metrics,
    recorded,
    responses,
    reward_of_zero,
    swapped,
    without_responses,
    zero,
)

from nemo_grpo.recipe.megatron_sections import Switch
from nemo_grpo.rehearsal import checks
from nemo_grpo.rehearsal.run_output import Recorded

Rehearsal = Any


@pytest.fixture
def rehearsal_of(tmp_path, monkeypatch):
    """A copy of a recording; its export is the recorded one, unless the test changes it."""
    monkeypatch.setattr(checks, "convert", lambda r, _checkpoint: r.folder / "hf-of-stop")
    monkeypatch.setattr(checks, "bridges_export", lambda r, _checkpoint: r.folder / "hf-of-bridge")

    def make(name):
        folder = tmp_path / name
        made = recorded(name, folder)
        shutil.copytree(folder / "hf-of-stop", folder / "hf-of-bridge")
        return made

    return make


def failing(rehearsal):
    return {stage.name: stage.proof for stage in checks.stages(rehearsal) if not stage.ok}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_pass_every_stage(rehearsal_of, name):
    rehearsal = rehearsal_of(name)
    stages = checks.stages(rehearsal)
    assert [stage for stage in stages if not stage.ok] == []
    learns = rehearsal.recipe.loss_fn.learns_from_demonstrations
    assert tuple(stage.name for stage in stages) == (checks.SUPERVISED if learns else tuple(checks.CHECKS))


def step_trained_twice(rehearsal):
    path = rehearsal.small.run_dir / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines() if '"loss/total"' in line]
    with path.open("a") as file:
        file.write(rows[1] + "\n")


def no_side_files(rehearsal):
    for path in rehearsal.small.checkpoint_dir.glob("step_*/policy/tokenizer/config.json"):
        path.unlink()


def without_tokens(row):
    return {**row, "token_loss_mask": [[0] * len(row["token_loss_mask"][0])]}


def one_token_less(row):
    mask = list(row["token_loss_mask"][0])
    mask[mask.index(1)] = 0
    return {**row, "token_loss_mask": [mask]}


def older_checkpoint(rehearsal):
    shutil.rmtree(rehearsal.small.checkpoint_dir / "step_3")


def one(_):
    return 1.0


def nan(_):
    return float("nan")


ROLLOUTS = {
    "stale weights": (lambda r: metrics(r, mismatch__kl=lambda e: e + 0.003), {"refit"}),
    "an error that is no number": (lambda r: metrics(r, mismatch__kl=nan), {"refit"}),
    "a response that is lost": (
        lambda r: files_of(r, [2])[0].write_text(files_of(r, [2])[0].read_text().partition("\n")[2]),
        {"rollout"},
    ),
    "responses without a token": (lambda r: responses(r, without_tokens, [2]), {"rollout"}),
    "a token that is lost": (lambda r: responses(r, one_token_less, [3]), {"rollout"}),
    "reward always 0": (lambda r: responses(r, reward_of_zero), {"reward"}),
    "no group with signal": (lambda r: metrics(r, groups__valid_fraction=zero), {"update"}),
    "weights that do not move": (
        lambda r: metrics(r, grad_norm=zero, train__probs_ratio_max=one),
        {"update"},
    ),
    "a loss that is no number": (lambda r: metrics(r, loss__total=nan), {"update"}),
    "another accuracy": (lambda r: metrics(r, validation__accuracy=lambda x: x + 0.25), {"validation"}),
    "no config.json": (no_side_files, {"checkpoint"}),
    "the last step's checkpoint lost": (older_checkpoint, {"checkpoint"}),
    "a step trained twice": (step_trained_twice, {"stop and resume"}),
    "gate and up swapped": (lambda r: export(r, swapped("gate_proj", "up_proj")), {"export"}),
    "keys and values swapped": (lambda r: export(r, swapped("k_proj", "v_proj")), {"export"}),
    "the untrained model exported": (drop_merge, {"export"}),
    "no responses recorded": (without_responses, {"rollout", "reward"}),
}


@pytest.mark.parametrize(("plant", "stages"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_defect_of_a_run_with_rollouts_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("erpo")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


DEMONSTRATIONS = {
    "merge dropped": (drop_merge, {"export"}),
    "a loss that is no number": (lambda r: metrics(r, loss__total=nan), {"update"}),
    "a validation loss that is no number": (lambda r: metrics(r, validation__val_loss=nan), {"validation"}),
}


@pytest.mark.parametrize(("plant", "stages"), DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_defect_of_a_run_on_demonstrations_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("sft_lora")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


def test_responses_through_the_data_plane_are_read_from_their_tokens(rehearsal_of):
    """NeMo-RL's trainer records the text of an array where the other one records turns."""
    rehearsal = rehearsal_of("erpo")
    expected = checks.rewards(Recorded(rehearsal))
    responses(rehearsal, lambda row: row | {"content": [str(row["content"])]})
    assert "reward" in failing(rehearsal)
    rehearsal.small = rehearsal.small.model_copy(update={"data_plane": Switch(enabled=True)})
    assert checks.rewards(Recorded(rehearsal)) == expected


def test_evidence_that_cannot_be_read_is_a_failure(rehearsal_of):
    rehearsal = rehearsal_of("erpo")
    files_of(rehearsal, [2])[0].write_text("no json\n")
    assert "cannot be read" in failing(rehearsal)["reward"]
