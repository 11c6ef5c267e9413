"""Transformer Engine's layers, as recorded, fit the converters' tables and every checkpoint of ours."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed import checkpoint as torch_checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.locate import locate
from nemo_grpo.engine.megatron.checkpoint import begin_save, load_policy
from nemo_grpo.engine.megatron.parallel import initialize
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.weights import cut_of
from nemo_grpo.families import family_for
from nemo_grpo.families.family import local_name
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer

CONTRACTS = Path(__file__).parents[1] / "contract"
_FILE = json.loads((CONTRACTS / "transformer_engine-2.20.2.json").read_text())
RECORDED, SIZES = _FILE["models"], _FILE["sizes"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
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
    # of two layers, and the last norm
    assert len(states) == {"qwen2": 9, "qwen3": 13, "qwen3_moe": 15}[model.split("-tp")[0]]
    assert all(name.endswith("._extra_state") and local_name(name) is None for name in states)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_checkpoint_keys_do_not_depend_on_the_layout(family):
    assert RECORDED[f"{family}-tp1"]["checkpoint"] == RECORDED[f"{family}-tp2"]["checkpoint"]


def asked_for(family: str) -> dict[str, Any]:
    """What a model of Transformer Engine's layers gives megatron-core to load; its tensors are NaN."""
    initialize(Layout(), torch.device("cpu"), seed=0)
    found: dict[str, Any] = {}
    for key, shape in RECORDED[f"{family}-tp1"]["checkpoint"].items():
        if shape is None:
            name, place = key.split("/shard_")
            at, size = (tuple(map(int, numbers.split("."))) for numbers in place.split("_"))
            found[f"{at}.{name}"] = ShardedObject(name, torch.ones(1), size, at)
        else:
            found[key] = ShardedTensor.from_rank_offsets(key, torch.full(shape, torch.nan))
    return found


def assert_all_filled(loaded: dict[str, Any], family: str) -> None:
    """No tensor is NaN, no object says anything."""
    assert len(loaded) == len(RECORDED[f"{family}-tp1"]["checkpoint"])
    for name, value in loaded.items():
        assert value is None if name.endswith("._extra_state") else value.isfinite().all(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_model_loads_as_megatron_core_does_by_default(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).float().save_pretrained(tmp_path / "hf")
    folder = hf_to_megatron(tmp_path / "hf", tmp_path / "megatron") / "iter_0000000"
    state = {"model": asked_for(family)}
    loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.ASSUME_OK_UNEXPECTED)
    assert_all_filled(loaded["model"], family)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_policy_of_local_layers_resumes_with_transformer_engines(family, tmp_path):
    config = CONFIGS[family]
    policy = MegatronPolicy(config, MegatronOptimizer(lr=1e-3, weight_decay=0.0))
    weights = AutoModelForCausalLM.from_config(config).float().state_dict()
    policy.load_weights(dict(weights), keep_reference=False)
    begin_save(policy, tmp_path / "weights", 1).finish()
    taken: dict[str, Any] = {}
    state = {"model": asked_for(family)}
    other: Any = SimpleNamespace(
        lora=None, sharded_state_dict=lambda loading: state, load_state_dict=taken.update
    )
    load_policy(other, tmp_path / "weights")
    assert_all_filled(taken["model"], family)
    norm = taken["model"]["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    assert torch.equal(norm[1], weights["model.layers.1.post_attention_layernorm.weight"])

    state["model"] = asked_for(family)
    state["model"]["bias"] = ShardedTensor.from_rank_offsets("decoder.layers.bias", torch.zeros(2))
    with pytest.raises(CheckpointingException, match=r"decoder\.layers\.bias"):
        load_policy(other, tmp_path / "weights")


@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_of_transformer_engines_layers_is_exported(family, tmp_path):
    keys = RECORDED[f"{family}-tp1"]["checkpoint"]
    tensors = {key: torch.zeros(shape) if shape else b"" for key, shape in keys.items()}
    torch_checkpoint.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    places = locate(family_for(CONFIGS[family].to_dict()), TorchDistReader(tmp_path))
    assert {place.name for place in places} == {key for key, shape in keys.items() if shape}
