"""Megatron-Bridge's conversions and ours of the same tiny models: each reads what the other has written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conv_models import assert_same_tensors, save_model, shapes_in, tensors_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf

HERE = Path(__file__).parent
FAMILIES = ("qwen2.5-vl", "qwen2.5-vl-tied", "gemma3", "deepseek-v3", "moonlight")


def bridge(*arguments):
    """`bridge_conversions.py` in a process of its own."""
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
    line = [sys.executable, "-W", "ignore", str(HERE / "bridge_conversions.py"), *map(str, arguments)]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    """A tiny model's folder, with a tokenizer, without which Bridge writes no folder."""
    folder = save_model(request.param, tmp_path / "model")
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(folder)
    return folder


def test_we_read_what_bridge_writes_and_write_the_same_names(model, tmp_path):
    bridge("import", model, tmp_path / "bridge")
    found = tensors_of(megatron_to_hf(tmp_path / "bridge", model, tmp_path / "hf"))
    assert_same_tensors(found, tensors_of(model))
    assert shapes_in(hf_to_megatron(model, tmp_path / "ours")) == shapes_in(tmp_path / "bridge")


def test_bridge_builds_and_exports_the_model_that_we_write(model, tmp_path):
    ours = hf_to_megatron(model, tmp_path / "ours")
    bridge("export", model, ours, tmp_path / "hf")
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(model))
