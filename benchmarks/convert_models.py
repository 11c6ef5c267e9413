"""Synthetic Qwen2-shaped model folders for the converter benchmarks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch

from checkpoints_conv.families import family_for
from checkpoints_conv.formats.dtypes import DTYPES, byte_view
from checkpoints_conv.formats.safetensors_io import SafetensorsWriter

HIDDEN, FFN, VOCAB, SHARD_BYTES = 2048, 11008, 151936, 2_000_000_000


def config_of(num_gigabytes: float) -> dict[str, object]:
    """A config whose bf16 weights take about this much; only the number of layers varies."""
    layer = 2 * (3 * HIDDEN * FFN + 2.25 * HIDDEN * HIDDEN)
    embeddings = 2 * 2 * VOCAB * HIDDEN
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": max(1, round((num_gigabytes * 1e9 - embeddings) / layer)),
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make_model(folder: Path, num_gigabytes: float, sparse: bool) -> int:
    """Write config and weights: zeros that take no disk space, or random numbers.

    Returns: bytes of the largest tensor.
    """
    folder.mkdir(parents=True)
    config = config_of(num_gigabytes)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = [
        (name, DTYPES["bfloat16"], shape)
        for unit in family_for(config).units()
        for name, shape in zip(unit.hf, unit.hf_shapes, strict=True)
    ]
    writer = SafetensorsWriter(folder, shapes, SHARD_BYTES)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, _, shape in shapes if not sparse else ():
        size = math.prod(shape)
        writer.write(name, byte_view(noise.repeat(-(-size // len(noise)))[:size]))
    writer.write_index()
    writer.close()
    return max(2 * math.prod(shape) for _, _, shape in shapes)


def num_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def flush(folder: Path) -> None:
    """Wait until the files are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
