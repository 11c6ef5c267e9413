"""Small Hugging Face models of every family, with weights that no symmetry hides behind."""

import json
from contextlib import closing
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, auto_class, small_config

from checkpoints_conv.formats.dtypes import byte_view, dtype_for
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter
from nemo_grpo.support.model_folder import hf_config

CONFIGS = {family: partial(small_config, family, num_hidden_layers=4) for family in FAMILIES}


def save_model(family, folder, dtype=torch.float32, **changes):
    """Write a model folder with a chat template and a generation config."""
    config = CONFIGS[family](**changes)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
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


def rewrite(folder, change=None, **config):
    """Other tensors in model.safetensors, which ``change`` changes in place, and another config.json."""
    if change is not None:
        tensors = tensors_of(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(folder) | config))


def assert_same_tensors(found, expected):
    """Same names, same dtypes, same bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def names_in(folder):
    """Of everything in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def shapes_in(checkpoint):
    """Of a Megatron checkpoint's weights, by key."""
    with closing(TorchDistReader(checkpoint)) as reader:
        return {name: key.shape for name, key in reader.weights.items()}


def write_chunk(writer, key, shape, offsets, tensor):
    """A tensor in memory as one chunk of a torch_dist checkpoint."""
    data = byte_view(tensor.contiguous())
    return writer.write(key, shape, dtype_for(tensor.dtype), offsets, tuple(tensor.shape), [data])


def save_adapters(adapters, folder, rank, alpha, *, stacked=True, beside=None):
    """LoRA matrices in the layout of Megatron-Bridge, B in two tensor-parallel chunks.

    Args: adapters: Megatron's layer -> (A of each layer [layers, rank, in], B [layers, out, rank]).
          stacked: as an axis of one key; False: the one layer is a part of the name.
          beside: what else the checkpoint holds, by its keys.
    Returns: the checkpoint's folder.
    """
    step = folder / "iter_0000010"
    step.mkdir(parents=True)
    writer, written = TorchDistWriter(step, 1), []
    for name, (a, b) in adapters.items():
        key = f"decoder.layers.{name}.adapter.linear_"
        half = b.shape[1] // 2
        for i in range(len(a)):
            chunks = [("in", a, 0, a[i : i + 1])]
            chunks += [("out", b, row, b[i : i + 1, row : row + half]) for row in (0, half)]
            for matrix, whole, row, part in chunks:
                shape, at = tuple(whole.shape), (i, row, 0)
                if not stacked:
                    shape, at, part = shape[1:], at[1:], part[0]
                written.append(write_chunk(writer, f"{key}{matrix}.weight", shape, at, part))
    for key, tensor in (beside or {}).items():
        written.append(write_chunk(writer, key, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
    writer.finish(written, [], 10)
    (step / "run_config.yaml").write_text(f"model:\n  x: 1\npeft:\n  dim: {rank}\n  alpha: {alpha}\nz: 1\n")
    return folder
