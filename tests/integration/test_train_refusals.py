"""What the embedded engine refuses, before anything is made."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file
from small_runs import NO_VALIDATION, QUICKSTART, arguments, begin, math_files
from transformers import AutoTokenizer

from nemo_grpo import UserError, cli
from nemo_grpo.engine.loop import train
from nemo_grpo.tasks import Problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("policy.precision=float16", "policy.precision=float16"),  # by a rule of recipes
        (
            "policy.megatron_cfg.fp8_cfg.enabled=true; policy.precision=bfloat16",
            "FP8 needs a CUDA GPU and torch finds none; use false",
        ),
        ("policy.model_name=/nowhere/model", "model_name='/nowhere/model' is not"),
        ("nemo_grpo.task.name=vision_counting", "vision_counting: its images need the cluster"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_is_made(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        begin(recipe(*overrides.split("; ")))
    assert not recipe().run_dir.exists()


def assert_refused(recipe, model, message, *overrides):
    r = recipe(f"policy.model_name={model}", *overrides)
    with pytest.raises(UserError, match=message):
        begin(r)
    assert not r.run_dir.exists()


def test_a_model_without_tokenizer_is_refused(recipe, model):
    for file in model.glob("*token*"):
        file.unlink()
    assert_refused(recipe, model, "has no tokenizer")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_model_with_weights_that_are_not_finite_is_refused(recipe, model, number):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = number
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert_refused(recipe, model, r"model\.norm\.weight holds NaN or inf; give a sound checkpoint")


def test_a_tokenizer_of_a_larger_model_is_refused(recipe, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<extra {number}>" for number in range(400)])
    tokenizer.save_pretrained(model)
    template = "nemo_grpo.prompt.template='<extra 399>{question}'"
    assert_refused(recipe, model, "put the model's own tokenizer into its folder", template)


def test_a_tokenizer_needs_no_padding_token(recipe, model):
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {
        "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    file.write_text(json.dumps(settings))
    source = f"policy.model_name={model}"
    parts = begin(recipe(source, *NO_VALIDATION, "grpo.max_num_steps=1"))
    assert parts.rollouts.tokenizer.pad_token_id is None
    assert train(parts)


def test_a_long_prompt_anywhere_in_the_files_is_refused_before_the_run(recipe, model, tmp_path):
    problems = [Problem(f"train{i}", f"What is {i} + 1?", "1") for i in range(200)]
    problems[170] = Problem("train170", "What? " * 200, "1")
    held_out = [Problem(f"held-out{i}", "What is 1 + 1 + 1?", "1") for i in range(16)]
    task = math_files(tmp_path, problems, held_out)
    assert_refused(recipe, model, r"problem 'train170' has a prompt of .* tokens", task)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.max_num_stepz=3", "did you mean 'max_num_steps'"),
        ("nemo_grpo.runs_dir=/proc/nowhere", "/proc/nowhere"),
        ("policy.max_total_sequence_length=40", "policy.max_total_sequence_length=40"),
    ],
)
def test_refusals_are_one_line_with_exit_code_2_and_nothing_is_made(
    tmp_path, monkeypatch, capsys, override, message
):
    monkeypatch.setattr(
        sys, "argv", ["nemo-grpo", "train", str(QUICKSTART), *arguments(tmp_path, "cli", override)]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "cli").exists()
