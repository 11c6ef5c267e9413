"""Defects planted in recorded rehearsals (`unit/rehearsal`): the oracle's proof of them must fail."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import recomputed
from unit.rehearsal.recordings import (
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

Rehearsal = Any


@pytest.fixture
def rehearsal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Rehearsal]:
    """A copy of a recording; its exports are the recorded ones, unless the test changes them."""
    for module in (oracle, recomputed):
        monkeypatch.setattr(module, "convert", lambda r, _checkpoint, name: r.folder / name)
    return lambda name: recorded(name, tmp_path / name)


def failing(rehearsal: Rehearsal) -> dict[str, str]:
    return {proof.name: proof.proof for proof in oracle.prove(rehearsal) if not proof.ok}


@pytest.mark.parametrize("name", RECORDINGS)
def test_recordings_are_proved(rehearsal_of, name):
    rehearsal = rehearsal_of(name)
    proofs = oracle.prove(rehearsal)
    assert [proof for proof in proofs if not proof.ok] == []
    learns = rehearsal.recipe.loss_fn.learns_from_demonstrations
    others = oracle.ROLLOUTS if learns else ("validation",)
    assert {proof.name for proof in proofs} == set(oracle.CHECKS) - set(others)


def same_responses_in_every_step(rehearsal: Rehearsal) -> None:
    """The policy does not move, so that old weights would do as well."""
    first, *others = files_of(rehearsal, (1, 2, 3))
    for path in others:
        shutil.copy(first, path)


def other_temperature(rehearsal: Rehearsal) -> None:
    generation = rehearsal.small.policy.generation
    assert generation.temperature != 1.0
    object.__setattr__(generation, "temperature", 1.0)


def advantages(factor: float) -> Callable[[dict], dict]:
    return lambda row: {**row, "advantages": [[factor * a for a in row["advantages"][0]]]}


ROLLOUTS = {
    "a refit that makes no difference": (same_responses_in_every_step, {"refit", "export"}),
    "logprobs of another temperature": (other_temperature, {"rollout", "update", "export"}),
    "reward always 0": (lambda r: responses(r, reward_of_zero), {"advantage", "update"}),
    "advantages too large by a tenth": (lambda r: responses(r, advantages(1.1)), {"advantage"}),
    "advantages of the wrong sign": (lambda r: responses(r, advantages(-1.0)), {"advantage"}),
    "loss 0": (lambda r: metrics(r, loss__total=zero, grad_norm=zero), {"advantage", "update"}),
    "a loss off by a twentieth of its parts": (
        lambda r: metrics(r, loss__total=lambda x: x + 0.05),
        {"update"},
    ),
    "a gradient too large by a tenth": (lambda r: metrics(r, grad_norm=lambda x: 1.1 * x), {"update"}),
    "gate and up swapped": (lambda r: export(r, swapped("gate_proj", "up_proj")), {"export"}),
    "no responses recorded": (without_responses, {"refit", "rollout", "advantage", "update", "export"}),
}


@pytest.mark.parametrize(("plant", "parts"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_defect_of_a_run_with_rollouts_is_caught(rehearsal_of, plant, parts):
    rehearsal = rehearsal_of("erpo")
    plant(rehearsal)
    assert set(failing(rehearsal)) == parts


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


@pytest.mark.parametrize(("plant", "parts"), DEMONSTRATIONS.values(), ids=DEMONSTRATIONS)
def test_defect_of_a_run_on_demonstrations_is_caught(rehearsal_of, plant, parts):
    rehearsal = rehearsal_of("sft_lora")
    plant(rehearsal)
    assert set(failing(rehearsal)) == parts


def test_adapters_that_are_all_zero_prove_nothing(rehearsal_of, monkeypatch):
    rehearsal = rehearsal_of("sft_lora")
    read = oracle.adapters_of

    def without_b(*given: Any) -> Any:
        found = read(*given)
        for each in found.layers:
            for b in each.b.values():
                b.zero_()
        return found

    monkeypatch.setattr(oracle, "adapters_of", without_b)
    assert "every adapter is 0" in failing(rehearsal)["export"]
