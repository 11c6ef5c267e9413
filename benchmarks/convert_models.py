"""Synthetic model folders of the shapes of Qwen2, Qwen3 and Moonlight for the converter benchmarks."""

import json
import math
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from checkpoints_conv.formats.dtypes import DTYPES, byte_view
from checkpoints_conv.formats.safetensors_writer import SafetensorsWriter
from nemo_grpo.models import family_for, read_spec
from nemo_grpo.plan.parameters import model_parameters

SHARD_BYTES = 2_000_000_000
QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MOONLIGHT: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


CONFIGS = {"qwen2": QWEN2, "qwen3": QWEN3, "moonlight": MOONLIGHT}


def config_of(num_gigabytes: float, family: str = "qwen2") -> dict[str, object]:
    """Make a config whose bf16 weights take about this much; only the number of layers varies."""
    base = CONFIGS[family]
    # Two layers are the fewest, so that Moonlight has one of each kind: dense, and with experts.
    with_two_layers = model_parameters(read_spec(base | {"num_hidden_layers": 2}))
    with_three_layers = model_parameters(read_spec(base | {"num_hidden_layers": 3}))
    num_further_layers = round(
        (num_gigabytes * 5e8 - with_two_layers) / (with_three_layers - with_two_layers)
    )
    if num_further_layers < 0:
        raise ValueError(
            f"{num_gigabytes} GB: two layers of {family} have {with_two_layers / 5e8:.2f}; give at least that"
        )
    return base | {"num_hidden_layers": 2 + num_further_layers}


def make_model(folder: Path, num_gigabytes: float, sparse: bool, family: str = "qwen2") -> int:
    """Write config and weights: zeros that take no disk space, or random numbers.

    Returns: bytes of the largest tensor.
    """
    folder.mkdir(parents=True)
    config = config_of(num_gigabytes, family)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = [(name, DTYPES["bfloat16"], shape) for name, shape in family_for(config).hf_shapes.items()]
    writer = SafetensorsWriter(folder, shapes, SHARD_BYTES)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    if not sparse:
        for name, _, shape in shapes:
            size = math.prod(shape)
            num_repeats = math.ceil(size / len(noise))
            writer.write(name, byte_view(noise.repeat(num_repeats)[:size]))
    writer.write_index()
    writer.close()
    return max(2 * math.prod(shape) for _, _, shape in shapes)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word, for converters that demand one."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a").save_pretrained(folder)


def num_bytes(folder: Path) -> int:
    """Add up the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def flush(folder: Path) -> None:
    """Wait until the files are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
