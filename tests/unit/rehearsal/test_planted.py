"""Defects planted in recorded rehearsals (`record.py`): the stage that is about them must fail.

Recorded from real runs of NeMo-RL: metrics, responses, the model, the export, the adapters. Megatron-Bridge's
export, equal to ours bit for bit in the recorded run, is a copy of ours.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from recordings import RECORDINGS, recorded
from safetensors.torch import load_file, save_file

from nemo_grpo.recipe.megatron_sections import Switch
from nemo_grpo.rehearsal import comparisons, evidence
from nemo_grpo.rehearsal import recorded as recorded_module
from nemo_grpo.rehearsal.comparisons import compare_with_entropy
from nemo_grpo.rehearsal.stages import Failed

Rehearsal = Any
Weights = dict[str, torch.Tensor]


@pytest.fixture
def rehearsal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Rehearsal]:
    """A copy of a recording; its export is the recorded one, unless the test changes it."""
    for module in (comparisons, recorded_module):
        monkeypatch.setattr(module, "convert", lambda r, _checkpoint, name="hf": r.folder / name)
    monkeypatch.setattr(evidence, "bridges_export", lambda r, _checkpoint: r.folder / "hf-of-bridge")

    def make(name: str) -> Rehearsal:
        folder = tmp_path / name
        made = recorded(name, folder)
        shutil.copytree(folder / "hf", folder / "hf-of-bridge")
        return made

    return make


def failing(rehearsal: Rehearsal) -> dict[str, str]:
    return {stage.name: stage.proof for stage in evidence.stages(rehearsal) if not stage.ok}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_pass_every_stage(rehearsal_of, name):
    rehearsal = rehearsal_of(name)
    stages = evidence.stages(rehearsal)
    assert [stage for stage in stages if not stage.ok] == []
    learns = rehearsal.recipe.loss_fn.learns_from_demonstrations
    assert tuple(stage.name for stage in stages) == (
        evidence.SUPERVISED if learns else tuple(evidence.CHECKS)
    )


# ---------------------------------------------------------------------- what a defect leaves behind


def metrics(rehearsal: Rehearsal, **changes: Callable[[float], float]) -> None:
    """Change logged numbers; ``name__part`` stands for ``name/part``."""
    path = rehearsal.small.run_dir / "metrics.jsonl"
    functions = {name.replace("__", "/"): change for name, change in changes.items()}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert functions.keys() <= {name for row in rows for name in row}, "the defect is in the recording"
    changed = [
        {name: functions.get(name, float)(value) if name != "step" else value for name, value in row.items()}
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))


def responses(rehearsal: Rehearsal, change: Callable[[dict], dict], steps: Iterable[int] = (1, 2, 3)) -> None:
    for path in files_of(rehearsal, steps):
        rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def files_of(rehearsal: Rehearsal, steps: Iterable[int]) -> list[Path]:
    logs = Path(str(rehearsal.small.logger.log_dir))
    (found,) = zip(*(logs.glob(f"exp_*/train_data_step{step}.jsonl") for step in steps), strict=True)
    return list(found)


def export(
    rehearsal: Rehearsal, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = rehearsal.folder / "hf" / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    def swap(weights: Weights) -> Weights:
        names = {first: second, second: first}
        parts = {name: name.split(".") for name in weights}
        renamed = {name: ".".join(names.get(part, part) for part in each) for name, each in parts.items()}
        assert renamed != {name: name for name in weights}
        return {renamed[name]: weight for name, weight in weights.items()}

    return swap


def drop_merge(rehearsal: Rehearsal) -> None:
    shutil.copy(rehearsal.folder / "model" / "model.safetensors", rehearsal.folder / "hf")


def same_responses_in_every_step(rehearsal: Rehearsal) -> None:
    """The policy does not move, so that old weights would do as well."""
    first, *others = files_of(rehearsal, (1, 2, 3))
    for path in others:
        shutil.copy(first, path)


def other_temperature(rehearsal: Rehearsal) -> None:
    generation = rehearsal.small.policy.generation
    assert generation.temperature != 1.0
    object.__setattr__(generation, "temperature", 1.0)


def step_trained_twice(rehearsal: Rehearsal) -> None:
    path = rehearsal.small.run_dir / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines() if '"loss/total"' in line]
    with path.open("a") as file:
        file.write(rows[1] + "\n")


def no_side_files(rehearsal: Rehearsal) -> None:
    for path in rehearsal.small.checkpoint_dir.glob("step_*/policy/tokenizer/config.json"):
        path.unlink()


def without_responses(rehearsal: Rehearsal) -> None:
    for path in files_of(rehearsal, (1, 2, 3)):
        path.unlink()


def reward_of_zero(row: dict) -> dict:
    return {**row, "rewards": [0.0]}


def advantages(factor: float) -> Callable[[dict], dict]:
    return lambda row: {**row, "advantages": [[factor * a for a in row["advantages"][0]]]}


def zero(_: float) -> float:
    return 0.0


ROLLOUTS = {
    "stale weights": (lambda r: metrics(r, mismatch__kl=lambda e: e + 0.003), {"refit"}),
    "a refit that makes no difference": (same_responses_in_every_step, {"refit", "export"}),
    "logprobs of another temperature": (other_temperature, {"rollout", "update", "export"}),
    "a response that is lost": (
        lambda r: files_of(r, [2])[0].write_text(files_of(r, [2])[0].read_text().partition("\n")[2]),
        {"rollout"},
    ),
    "reward always 0": (lambda r: responses(r, reward_of_zero), {"reward", "advantage", "update"}),
    "advantages too large by a tenth": (lambda r: responses(r, advantages(1.1)), {"advantage"}),
    "advantages of the wrong sign": (lambda r: responses(r, advantages(-1.0)), {"advantage"}),
    "loss 0": (lambda r: metrics(r, loss__total=zero, grad_norm=zero), {"advantage", "update"}),
    "a loss off by a twentieth of its parts": (
        lambda r: metrics(r, loss__total=lambda x: x + 0.05),
        {"update"},
    ),
    "a gradient too large by a tenth": (lambda r: metrics(r, grad_norm=lambda x: 1.1 * x), {"update"}),
    "another accuracy": (lambda r: metrics(r, validation__accuracy=lambda x: x + 0.25), {"validation"}),
    "no config.json": (no_side_files, {"checkpoint"}),
    "a step trained twice": (step_trained_twice, {"stop and resume"}),
    "gate and up swapped": (lambda r: export(r, swapped("gate_proj", "up_proj")), {"export"}),
    "keys and values swapped": (lambda r: export(r, swapped("k_proj", "v_proj")), {"export"}),
    "the untrained model exported": (drop_merge, {"export"}),
    "no responses recorded": (
        without_responses,
        {"refit", "rollout", "reward", "advantage", "update", "export"},
    ),
}


@pytest.mark.parametrize(("plant", "stages"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_defect_of_a_run_with_rollouts_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("erpo")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


DEMONSTRATIONS = {
    "merge dropped": (drop_merge, {"update", "export"}),
    "merge of gate and up swapped": (
        lambda r: export(r, swapped("gate_proj", "up_proj")),
        {"update", "export"},
    ),
    "loss of another normalisation": (lambda r: metrics(r, loss__total=lambda x: x / 2), {"update"}),
    "gradient of another normalisation": (lambda r: metrics(r, grad_norm=lambda x: x / 2), {"update"}),
    "another validation loss": (lambda r: metrics(r, validation__val_loss=lambda x: 1.1 * x), {"validation"}),
}


@pytest.mark.parametrize(("plant", "stages"), DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_defect_of_a_run_on_demonstrations_is_caught(rehearsal_of, plant, stages):
    rehearsal = rehearsal_of("sft_lora")
    plant(rehearsal)
    assert set(failing(rehearsal)) == stages


def test_wrong_row_factors_are_caught(rehearsal_of, monkeypatch):
    """The run's gradient against that of the same tokens without the factors."""
    rehearsal = rehearsal_of("erpo")
    monkeypatch.setattr(
        "nemo_grpo.core.objective.group_mean_factors", lambda batch, _: torch.ones(len(batch.mask))
    )
    assert set(failing(rehearsal)) == {"update"}


def test_responses_through_the_data_plane_are_read_from_their_tokens(rehearsal_of):
    """NeMo-RL's trainer records the text of an array where the other one records turns."""
    rehearsal = rehearsal_of("erpo")
    expected = evidence.rewards(evidence.Evidence(rehearsal))
    responses(rehearsal, lambda row: row | {"content": [str(row["content"])]})
    assert "reward" in failing(rehearsal)
    rehearsal.small = rehearsal.small.model_copy(update={"data_plane": Switch(enabled=True)})
    assert evidence.rewards(evidence.Evidence(rehearsal)) == expected


def test_logged_entropy_stands_for_logprobs_that_were_not_scored(rehearsal_of):
    """As after `force_on_policy_ratio`, whose prev_logprobs are zeros."""
    found = evidence.Evidence(rehearsal_of("erpo"))
    step, folder = found.resumed_step, found.rehearsal.folder
    rows, logged = found.responses(step), found.steps[step]["train/approx_entropy"]
    assert f"logged {logged:.4f}" in compare_with_entropy(found, folder / "hf", rows, logged)
    with pytest.raises(Failed, match=r"^entropy .*; 0\.005 is allowed"):
        compare_with_entropy(found, folder / "model", rows, logged)


def test_a_gradient_may_differ_by_what_rounding_makes_of_it(rehearsal_of, monkeypatch):
    rehearsal = rehearsal_of("erpo")
    metrics(rehearsal, grad_norm=lambda x: 1.1 * x)
    found = evidence.Evidence(rehearsal)
    assert found.recomputed.gradient_norm is not None
    assert 0 < found.rounding_of_norm < 0.05 * found.recomputed.gradient_norm
    rounding = 0.2 * found.recomputed.gradient_norm
    monkeypatch.setattr(evidence.Evidence, "rounding_of_norm", rounding)
    assert f"BF16 alone moves it by {rounding:.3f}" in evidence.update(evidence.Evidence(rehearsal))
    metrics(rehearsal, grad_norm=lambda x: 1.2 * x)
    with pytest.raises(Failed, match=r"BF16 alone moves it by .*, but .* is logged"):
        evidence.update(evidence.Evidence(rehearsal))


def test_a_refit_may_differ_by_twice_what_rounding_makes_of_it(rehearsal_of, monkeypatch):
    rehearsal = rehearsal_of("erpo")
    assert 0 < evidence.Evidence(rehearsal).rounding_of_logprobs < evidence.REFIT_BOUND / 2
    metrics(rehearsal, mismatch__kl=lambda e: e + 0.0009)
    monkeypatch.setattr(evidence.Evidence, "rounding_of_logprobs", 0.0005)
    assert "(bound 0.001; " in evidence.refit(evidence.Evidence(rehearsal))
    monkeypatch.setattr(evidence, "_error_of_old_weights", lambda _: 0.0009)
    with pytest.raises(Failed, match="a refit is not tested"):
        evidence.refit(evidence.Evidence(rehearsal))
    monkeypatch.setattr(evidence.Evidence, "rounding_of_logprobs", 0.0004)
    with pytest.raises(Failed, match=r"the bound is 0\.0008"):
        evidence.refit(evidence.Evidence(rehearsal))


def test_adapters_that_are_all_zero_prove_nothing(rehearsal_of, monkeypatch):
    rehearsal = rehearsal_of("sft_lora")
    read = comparisons.adapters_of

    def without_b(*given: Any) -> Any:
        found = read(*given)
        for each in found.layers:
            for b in each.b.values():
                b.zero_()
        return found

    monkeypatch.setattr(comparisons, "adapters_of", without_b)
    assert "every adapter is 0" in failing(rehearsal)["export"]


def test_evidence_that_cannot_be_read_is_a_failure(rehearsal_of):
    rehearsal = rehearsal_of("erpo")
    files_of(rehearsal, [2])[0].write_text("no json\n")
    assert "cannot be read" in failing(rehearsal)["reward"]
