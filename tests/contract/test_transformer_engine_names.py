"""Transformer Engine's parameters, recorded from its layers, are those that the converters' tables expect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen3Config

from checkpoints_conv.families import family_for
from checkpoints_conv.families.family import local_name
from nemo_grpo.engine.megatron.weights import cut_of

RECORDED = json.loads((Path(__file__).parent / "transformer_engine-2.12.0.json").read_text())["models"]
SIZES = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
}


@pytest.mark.parametrize("model", RECORDED)
def test_names_and_shapes_are_those_of_the_table(model):
    family, ranks = model.split("-tp")
    expected = {}
    for unit in family_for(CONFIGS[family].to_dict()).units():
        shape = [unit.rows, *unit.shape[1:]]
        dim, _ = cut_of(unit.megatron)
        if dim is not None:
            shape[dim] //= int(ranks)
        expected[unit.megatron] = shape
    found = {local_name(name): shape for name, shape in RECORDED[model]["parameters"].items()}
    assert found == expected


@pytest.mark.parametrize("model", RECORDED)
def test_every_state_besides_weights_is_known_as_such(model):
    states = RECORDED[model]["extra_states"]
    assert len(states) == 9 + 4 * model.startswith("qwen3")  # of two layers, and the last norm
    assert all(name.endswith("._extra_state") and local_name(name) is None for name in states)
