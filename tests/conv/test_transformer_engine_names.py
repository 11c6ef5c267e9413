"""A converted checkpoint has the keys and shapes that Transformer Engine's layers ask megatron-core for.

`transformer_engine-2.20.2.json` records them, extra states as null; they are the same at any layout.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from checkpoints_conv.hf_to_megatron import hf_to_megatron

_FILE = json.loads((Path(__file__).parents[1] / "contract/transformer_engine-2.20.2.json").read_text())
SIZES, RECORDED = _FILE["sizes"], _FILE["checkpoints"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_checkpoint_has_every_key_of_transformer_engines_layers(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).float().save_pretrained(tmp_path / "hf")
    folder = hf_to_megatron(tmp_path / "hf", tmp_path / "megatron") / "iter_0000000"
    stored = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {name: list(one.size) if hasattr(one, "size") else None for name, one in stored.items()}
    assert {name: found.get(name, "missing") for name in RECORDED[family]} == RECORDED[family]
