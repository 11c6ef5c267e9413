"""Small Hugging Face models of every family, with weights that no symmetry hides behind."""

from __future__ import annotations

import json
from functools import partial

import torch
from safetensors.torch import load_file
from small_models import FAMILIES, auto_class, small_config

from checkpoints_conv.formats.dtypes import byte_view, dtype_for

CONFIGS = {family: partial(small_config, family, num_hidden_layers=4) for family in FAMILIES}


def save_model(family, folder, dtype=torch.float32, **changes):
    """Write a model folder with a chat template and a generation config."""
    config = CONFIGS[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return folder


def tensors_of(folder):
    """All tensors of a model folder, by the safetensors library."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(found, expected):
    """Same names, same dtypes, same bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def names_in(folder):
    """Of everything in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def write_chunk(writer, key, shape, offsets, tensor):
    """A tensor in memory as one chunk of a torch_dist checkpoint."""
    data = byte_view(tensor.contiguous())
    return writer.write(key, shape, dtype_for(tensor.dtype), offsets, tuple(tensor.shape), [data])
