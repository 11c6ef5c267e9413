"""policy.precision=auto: what it becomes on which processor, and that a resumed run keeps it."""

import logging
from pathlib import Path

import pytest
import torch
from processes import ROOT

from nemo_grpo.engine.checks import choose_precision
from nemo_grpo.engine.resume import check_same_run
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.support import machine
from nemo_grpo.support.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WITHOUT, WITH = {"AuthenticAMD", "avx2"}, {"AuthenticAMD", "avx512_bf16"}


def recipe_with(precision: str) -> Recipe:
    return load_recipe(ROOT / "recipes/quickstart.yaml", [f"policy.precision={precision}"])


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    def be(words: set[str]) -> None:
        monkeypatch.setattr(machine, "_words", lambda: frozenset(words))

    return be


@pytest.mark.parametrize(
    ("words", "device", "width", "asked", "expected"),
    [
        (WITHOUT, CPU, 576, "auto", "float32"),
        (WITH, CPU, 576, "auto", "bfloat16"),
        ({"amx_bf16"}, CPU, 576, "auto", "bfloat16"),
        (WITH, CPU, 128, "auto", "float32"),
        (WITHOUT, CUDA, 128, "auto", "bfloat16"),
        (WITH, CPU, 576, "float32", "float32"),
    ],
)
def test_auto_is_the_faster_one_for_the_machine_and_the_model(on, words, device, width, asked, expected):
    on(words)
    assert choose_precision(recipe_with(asked), device, width, None, leads=True).policy.precision == expected


def test_a_resumed_run_keeps_its_precision_on_another_processor(on, tmp_path: Path):
    on(WITH)
    recipe, begun = recipe_with("auto"), tmp_path / "recipe.resolved.yaml"
    begun.write_text(choose_precision(recipe, CPU, 576, None, leads=True).to_yaml())
    on(WITHOUT)
    first = check_same_run(recipe, begun)
    assert choose_precision(recipe, CPU, 576, first, leads=True).policy.precision == "bfloat16"
    with pytest.raises(UserError, match=r"policy\.precision: bfloat16 -> float32"):
        check_same_run(recipe_with("float32"), begun)


@pytest.mark.parametrize(("words", "num_lines"), [(WITHOUT, 1), (WITH, 0)])
def test_bf16_without_instructions_is_said_once(on, words, num_lines, caplog: pytest.LogCaptureFixture):
    on(words)
    for leads in (True, False):
        choose_precision(recipe_with("bfloat16"), CPU, 576, None, leads=leads)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == num_lines
    assert all("6 to 10 times as long" in line.getMessage() for line in lines)


def test_the_choice_of_auto_is_printed(on, caplog: pytest.LogCaptureFixture):
    on(WITHOUT)
    with caplog.at_level(logging.INFO):
        choose_precision(recipe_with("auto"), CPU, 576, None, leads=True)
    assert "policy.precision=auto: float32" in caplog.text
