"""Defects planted in recorded rehearsals (`unit/rehearsal`): the oracle's proof of them must fail."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import recomputed
import torch
from oracle import Proof, compare_with_entropy
from recomputed import Run, Sampling
from transformers import AutoConfig
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
from unit.rehearsal.test_small_vision import RECIPE, made_model, made_tokenizer, picture, tokens_of

from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.stages import Failed
from nemo_grpo.rehearsal.tiny_data import ToyTask, problems_of

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


def test_wrong_row_factors_are_caught(rehearsal_of, monkeypatch):
    """The run's gradient against that of the same tokens without the factors."""
    rehearsal = rehearsal_of("erpo")
    monkeypatch.setattr(
        "nemo_grpo.core.objective.group_mean_factors", lambda batch, _: torch.ones(len(batch.mask))
    )
    assert set(failing(rehearsal)) == {"update"}


def test_logged_entropy_stands_for_logprobs_that_were_not_scored(rehearsal_of):
    """As after `force_on_policy_ratio`, whose prev_logprobs are zeros."""
    found = Proof(rehearsal_of("erpo")).run
    step, folder = found.resumed_step, found.rehearsal.folder
    rows, logged = found.responses(step), found.steps[step]["train/approx_entropy"]
    assert f"logged {logged:.4f}" in compare_with_entropy(found, folder / "hf-of-stop", rows, logged)
    with pytest.raises(Failed, match=r"^entropy .*; 0\.005 is allowed"):
        compare_with_entropy(found, folder / "model", rows, logged)


def test_a_gradient_may_differ_by_what_rounding_makes_of_it(rehearsal_of, monkeypatch):
    rehearsal = rehearsal_of("erpo")
    metrics(rehearsal, grad_norm=lambda x: 1.1 * x)
    found = Proof(rehearsal)
    assert found.recomputed.gradient_norm is not None
    assert 0 < found.rounding_of_norm < 0.05 * found.recomputed.gradient_norm
    rounding = 0.2 * found.recomputed.gradient_norm
    monkeypatch.setattr(Proof, "rounding_of_norm", rounding)
    assert f"BF16 alone moves it by {rounding:.3f}" in oracle.update(Proof(rehearsal))
    metrics(rehearsal, grad_norm=lambda x: 1.2 * x)
    with pytest.raises(Failed, match=r"BF16 alone moves it by .*, but .* is logged"):
        oracle.update(Proof(rehearsal))


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


# ---------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return made_model(tokenizer)


def recorded_rows(tokenizer, problems, numbers) -> list[dict]:
    """Responses to made-up problems, as NeMo-RL records them."""
    rows = []
    for problem in problems:
        ids = tokens_of(tokenizer, *numbers)
        parts = [{"type": "image", "image": problem.metadata["images"][0]}]
        parts.append({"type": "text", "text": f"{problem.question}\nThink."})
        mask = [0] * (len(ids) - 2) + [1, 1]
        rows.append({
            "content": [[parts, "so", ""]], "token_ids": [ids.tolist()], "input_lengths": [len(ids)],
            "token_loss_mask": [mask], "generation_logprobs": [[0.0] * len(ids)],
        })  # fmt: skip
    return rows


class Seeing(Run):
    """Recorded responses; a problem's picture is drawn from its number, in place of a processor's."""

    def seen(self, problem):
        return picture(int(Path(problem.metadata["images"][0]).stem))


@pytest.fixture
def run(tmp_path, model):
    recipe = load_recipe(RECIPE, ["grpo.num_generations_per_prompt=2"])
    problems = problems_of(recipe, tmp_path / "problems")
    taught = recipe.model_copy(
        update={"nemo_grpo": recipe.nemo_grpo.model_copy(update={"task": problems.task})}
    )
    model.save_pretrained(tmp_path / "model")
    return Seeing(
        SimpleNamespace(
            small=recipe, recipe=recipe, taught=taught, problems=problems,
            model=SimpleNamespace(folder=tmp_path / "model"), stack=SimpleNamespace(sees_images=True),
        )
    )  # fmt: skip


def known(run):
    return ToyTask(run.rehearsal.taught, run.rehearsal.problems.task).known


def test_a_response_is_recognised_by_its_picture_where_questions_repeat(run, tokenizer):
    problems = known(run)
    assert len({problem.question for problem in problems}) < len(problems)
    rows = recorded_rows(tokenizer, problems, (7, 8))
    for problem, seen in zip(problems, run.images_of(rows), strict=True):
        assert torch.equal(seen["pixel_values"], run.seen(problem)["pixel_values"])
    rows[1]["content"][0][0][0]["image"] = "/elsewhere/1.png"
    with pytest.raises(Failed, match="the problem of response 1 is not recognised"):
        run.images_of(rows)


def test_images_that_make_no_difference_are_said_to_prove_nothing(run, tokenizer, model, tmp_path):
    problems = [problem for problem in known(run)[:3] for _ in range(2)]
    rows = recorded_rows(tokenizer, problems, (7, 8))
    sequences = oracle.sequences_of(run, rows)
    own, _ = oracle.all_logprobs(model, sequences, Sampling())
    for row, values in zip(rows, own, strict=True):
        row["generation_logprobs"] = [[0.0, *values.tolist()]]
    folder = tmp_path / "model"
    assert "0.0000 from the sampler's" in oracle.compare_with_model(
        run, folder, rows, "generation_logprobs", "sampler"
    )
    shown = oracle.error_of_other_images(run, rows, "generation_logprobs")
    assert float(shown.split()[0]) > oracle.TOLERANCE
    swapped = replace(sequences, seen=[*sequences.seen[2:], *sequences.seen[:2]])
    wrong, _ = oracle.all_logprobs(model, swapped, Sampling())
    assert not torch.allclose(wrong, own, atol=oracle.TOLERANCE)
    blind = vision.model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    torch.nn.init.zeros_(blind.model.visual.merger.mlp[2].weight)
    blind.save_pretrained(folder)
    for row, values in zip(rows, oracle.all_logprobs(blind, sequences, Sampling())[0], strict=True):
        row["generation_logprobs"] = [[0.0, *values.tolist()]]
    with pytest.raises(Failed, match="so that confused images are not noticed"):
        oracle.error_of_other_images(run, rows, "generation_logprobs")
