"""Megatron-Bridge's conversions and ours of the same tiny models: each reads what the other has written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conv_models import assert_same_tensors, save_model, shapes_in, tensors_of
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

HERE = Path(__file__).parent
FAMILIES = (
    *("qwen2.5-vl", "qwen2.5-vl-tied", "gemma3", "deepseek-v3", "moonlight"),
    *("glm-4.5", "glm-4.5-air", "gpt-oss", "qwen3.5", "qwen3.5-tied", "qwen3.5-moe"),
)


def bridge(*arguments):
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
    line = [sys.executable, "-W", "ignore", str(HERE / "bridge_conversions.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def saved(name, folder, dtype=torch.float32):
    save_model(name, folder, dtype)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(folder)
    return folder


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    """Bridge builds gpt-oss in bf16, whatever the model is."""
    dtype = torch.bfloat16 if request.param == "gpt-oss" else torch.float32
    return saved(request.param, tmp_path / "model", dtype)


def test_we_read_what_bridge_writes_and_write_the_same_names(model, tmp_path):
    bridge("import", model, tmp_path / "bridge")
    found = tensors_of(megatron_to_hf(tmp_path / "bridge", model, tmp_path / "hf"))
    assert_same_tensors(found, tensors_of(model))
    ours = shapes_in(hf_to_megatron(model, tmp_path / "ours"))
    twins = {twin for unit in family_for(hf_config(model)).units() for twin in unit.storage.twins}
    stored = {name: shape for name, shape in ours.items() if name not in twins}
    assert stored == shapes_in(tmp_path / "bridge")


def test_bridge_builds_and_exports_the_model_that_we_write(model, tmp_path):
    ours = hf_to_megatron(model, tmp_path / "ours")
    bridge("export", model, ours, tmp_path / "hf")
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(model))


@pytest.mark.parametrize("name", ["glm-4.5", "glm-4.5-air", "gpt-oss", "qwen3.5", "qwen3.5-moe"])
def test_megatron_computes_with_our_checkpoint_what_transformers_computes(name, tmp_path):
    """The weights are where they belong, and run_config.yaml says the rest of the model."""
    model = saved(name, tmp_path / "model")
    bridge("logits", model, hf_to_megatron(model, tmp_path / "ours"), tmp_path / "logits.pt")
    found = torch.load(tmp_path / "logits.pt")
    ids = torch.arange(3, 3 + found.shape[1])[None]
    original = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = original(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
