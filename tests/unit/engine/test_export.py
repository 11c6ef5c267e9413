"""What is never exported, and models that are not there."""

import math
from pathlib import Path

import pytest
import torch

from nemo_grpo import UserError
from nemo_grpo.run.recipe_checks import check_model_folder
from nemo_grpo.support.hf_folder import export, export_adapter


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.bfloat16), (1e5, torch.float16)]
)
def test_weights_that_are_not_finite_are_not_exported(tmp_path, value, dtype):
    tensors = [("empty", torch.zeros(0)), ("w", torch.tensor([1.0, value]))]
    with pytest.raises(UserError, match="hf is not written: w holds NaN or inf"):
        export(tensors, tmp_path, tmp_path / "hf", dtype, None)
    if dtype is torch.float32:
        with pytest.raises(UserError, match="hf-adapter is not written: w holds NaN or inf"):
            export_adapter(dict(tensors), tmp_path, tmp_path / "hf-adapter", None, dim=1, alpha=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("runs/sft/hf", "train the run that exports it first"),
        ("runs/sft/hf/step_20", "train the run that exports it first"),
        (".cache/smollm2", "`python -m nemo_grpo.data.smollm2 .cache/smollm2` writes it"),
        ("models/mine", "give a Hugging Face model folder; `hf download models/mine"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_what_makes_it(folder, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"is not a folder; {remedy}"):
        check_model_folder(Path(folder), "policy.model_name")


def test_a_folder_of_which_transformers_loads_more_than_the_model_is_refused(tmp_path):
    for name, text in (("config.json", "{}"), ("model.safetensors", ""), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    check_model_folder(tmp_path, "policy.model_name")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="transformers adds an adapter to the weights; merge it first"):
        check_model_folder(tmp_path, "policy.model_name")
