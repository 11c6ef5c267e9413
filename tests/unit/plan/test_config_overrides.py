"""policy.hf_config_overrides count wherever a model's configuration is read."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nemo_grpo.plan.inputs import PRESETS, shape_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal.small_config import small_config
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import with_config_overrides

STOCK = """
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 16, max_num_steps: 10}
policy:
  model_name: MODEL
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 262144
  sequence_packing: {enabled: true, train_mb_tokens: 262144, logprob_mb_tokens: 262144}
  megatron_cfg: {enabled: true, optimizer: {lr: 1.0e-6}}
  generation: {backend: vllm, max_new_tokens: 256}
data: {train: {dataset_name: gsm8k}, default: {env_name: math}}
env: {math: {num_workers: 8}}
checkpointing: {checkpoint_dir: results/mine}
logger: {log_dir: logs}
"""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000,
    "factor": 2.0,
    "original_max_position_embeddings": 131072,
}
CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture(params=["Qwen/Qwen2.5-1.5B", "folder"])
def load(request, tmp_path):
    name = request.param
    if name == "folder":
        name = str(tmp_path / "model")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))

    def loaded(overrides):
        path = tmp_path / "mine.yaml"
        path.write_text(STOCK.replace("MODEL", name))
        return load_recipe(path, [f"++policy.hf_config_overrides={json.dumps(overrides)}"])

    return loaded


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ({"rope_scaling": YARN}, 262144),
        ({"rope_scaling": YARN | {"factor": 4.0}}, 524288),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 262144),
        ({"max_position_embeddings": 262144}, 262144),
        ({"rope_scaling": YARN | {"factor": 1.5}}, 196608),
        ({"max_position_embeddings": 16384}, 16384),
        ({}, 131072),
    ],
)
def test_the_longest_sequence_is_that_of_the_overridden_configuration(load, overrides, longest):
    recipe = load(overrides)
    assert shape_of(recipe).longest_sequence == longest
    found = check_recipe(recipe)
    refused = [error for error in found.errors if "policy.max_total_sequence_length=262144 exceeds" in error]
    assert bool(refused) == (longest < 262144)


def test_the_rehearsals_model_has_the_overridden_rotary_scaling(load):
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config, _ = small_config(load({"rope_scaling": YARN}), 64, tokenizer)
    scaling = config.rope_parameters
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 2.0)


def test_nested_configurations_are_updated_and_everything_else_is_replaced():
    config = {"text_config": {"a": 1, "b": 2}, "rope_scaling": {"factor": 2, "type": "linear"}, "c": 3}
    changed = with_config_overrides(config, {"text_config": {"b": 4}, "rope_scaling": {"type": "yarn"}})
    assert changed == {"text_config": {"a": 1, "b": 4}, "rope_scaling": {"type": "yarn"}, "c": 3}
    assert config["text_config"]["b"] == 2


def test_gemmas_stated_length_is_the_scaled_one():
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    spec = replace(PRESETS["Qwen/Qwen2.5-1.5B"], rope=rope)
    assert spec.longest_sequence == 8 * spec.max_position_embeddings
    assert replace(spec, model_type="gemma3_text").longest_sequence == spec.max_position_embeddings


def test_a_key_that_no_configuration_can_have_is_refused_by_its_value(load):
    with pytest.raises(UserError, match="num_attention_heads"):
        shape_of(load({"num_attention_heads": 0}))
