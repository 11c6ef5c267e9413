"""Published models by their own config.json: counted, and converted at small sizes of the same form."""

import json
import math

import pytest
import torch
import transformers
from conv_models import assert_same_tensors, tensors_of
from published_configs import PUBLISHED
from small_models import auto_class

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo.models import family_for
from nemo_grpo.plan.parameters import model_parameters
from nemo_grpo.support.model_folder import hf_config

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 16, "vocab_size": 300,
    "num_hidden_layers": 6, "num_experts": 4, "n_routed_experts": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "linear_key_head_dim": 8, "linear_num_key_heads": 4, "linear_value_head_dim": 6, "depth": 2,
    "linear_num_value_heads": 8, "out_hidden_size": 64, "num_heads": 2, "window_size": 28,
}  # fmt: skip
"""Replaces sizes alone: everything else of a config.json is as it was published."""
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vision_start_token_id": 290}
TOKENS |= {"vision_end_token_id": 291, "image_token_id": 292, "video_token_id": 293, "vision_token_id": 294}
OWN = {"kimi_k2": "deepseek_v3"}
"""Model types that need code from the Hub -> the type by which transformers has the same model."""


def small(config):
    """The same config.json with small sizes and token ids within the vocabulary."""
    found = {key: {**SMALL, **TOKENS}.get(key, value) for key, value in config.items()}
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    found["num_key_value_heads"] = max(1, 8 // groups)
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][: found["num_hidden_layers"]]
    if "vision_config" in found:
        found["vision_config"] = {key: SMALL.get(key, value) for key, value in found["vision_config"].items()}
        found["vision_config"]["fullatt_block_indexes"] = [1]
        found["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_and_planner_count_as_published(name):
    expected, config = PUBLISHED[name]
    family = family_for(config)
    assert sum(map(math.prod, family.hf_shapes.values())) == expected
    assert model_parameters(family.spec) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_form_of_its_config_converts_both_ways(name, tmp_path):
    config = small(PUBLISHED[name][1])
    torch.manual_seed(0)
    source = tmp_path / "source"
    kind = config["model_type"]
    own = transformers.AutoConfig.for_model(**config | {"model_type": OWN.get(kind, kind)})
    auto_class(own).from_config(own).to(torch.bfloat16).save_pretrained(source)
    (source / "config.json").write_text(json.dumps(config))
    megatron = hf_to_megatron(source, tmp_path / "megatron")
    assert not verify(source, megatron).different
    back = megatron_to_hf(megatron, source, tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(source))
    kept = {"dtype", "torch_dtype", "num_nextn_predict_layers", "mtp_num_hidden_layers"}
    same = {key: value for key, value in config.items() if key not in kept}
    assert {key: value for key, value in hf_config(back).items() if key not in kept} == same
