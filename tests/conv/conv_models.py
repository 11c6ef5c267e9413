"""Small Hugging Face models of every family, with weights that no symmetry hides behind."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints_conv.dtypes import byte_view, dtype_for

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
}


def save_model(family, folder, dtype=torch.float32, **changes):
    """Write a model folder with a chat template and a generation config."""
    config = CONFIGS[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
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
