"""The tables: names, layouts worked out by hand, and what does not fit."""

import json
import math

import pytest
import torch
import transformers
from conv_models import CONFIGS, assert_same_tensors, tensors_of
from published_configs import PUBLISHED
from small_models import auto_class

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.models import family_for
from nemo_grpo.models.config_validation import checked
from nemo_grpo.models.ops import GATED_QKV, GROUPED_QKV, ONE_BELOW_THE_OTHER, ONE_SUBTRACTED
from nemo_grpo.plan.parameters import model_parameters
from nemo_grpo.support.model_folder import hf_config

TINY = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5, "max_position_embeddings": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "moe_intermediate_size": 2}
MIXED_LAYERS = {**EXPERTS, "mlp_only_layers": [0]}


def tiny_tensors(**changes):
    shapes = {
        "model.embed_tokens.weight": (5, 4),
        "model.norm.weight": (4,),
        "model.layers.0.input_layernorm.weight": (4,),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.layers.0.self_attn.k_proj.weight": (2, 4),
        "model.layers.0.self_attn.v_proj.weight": (2, 4),
        "model.layers.0.self_attn.q_proj.bias": (4,),
        "model.layers.0.self_attn.k_proj.bias": (2,),
        "model.layers.0.self_attn.v_proj.bias": (2,),
        "model.layers.0.self_attn.o_proj.weight": (4, 4),
        "model.layers.0.post_attention_layernorm.weight": (4,),
        "model.layers.0.mlp.gate_proj.weight": (3, 4),
        "model.layers.0.mlp.up_proj.weight": (3, 4),
        "model.layers.0.mlp.down_proj.weight": (4, 3),
    }
    return {name: torch.randn(shape) for name, shape in (shapes | changes).items()}


def test_qkv_rows_are_grouped_by_key_value_head():
    """4 heads, 2 groups, head size 1: group 0 has queries 0 and 1, then its key, then its value."""
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    dims = {"groups": 2}
    whole = GROUPED_QKV.join([q, k, v], dims)
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = GROUPED_QKV.split(whole, [4, 2, 2], dims)
    assert [part.tolist() for part in parts] == [q.tolist(), k.tolist(), v.tolist()]
    heads_of_two = GROUPED_QKV.join([q, k, v], {"groups": 1})  # the rows of a head stay together
    assert heads_of_two.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_gates_of_a_group_follow_its_queries():
    """4 heads, 2 groups, head size 1: below each query its gate; the whole has a group's queries first."""
    q, k, v = torch.tensor([0.0, 50, 1, 51, 2, 52, 3, 53]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    dims = {"groups": 2, "d": 1}
    whole = GATED_QKV.join([q, k, v], dims)
    assert whole.tolist() == [0, 1, 50, 51, 10, 20, 2, 3, 52, 53, 11, 21]
    parts = GATED_QKV.split(whole, [8, 2, 2], dims)
    assert [part.tolist() for part in parts] == [q.tolist(), k.tolist(), v.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_is_stored_less_one_in_the_next_wider_dtype(dtype):
    """2^-7 + 2^-14 has 8 bits; less one it needs 14."""
    scale = torch.tensor([1.5, 0.5, 2.0, 2**-7 + 2**-14], dtype=dtype)
    less_one = ONE_SUBTRACTED.join([scale], {})
    assert less_one.tolist() == [0.5, -0.5, 1.0, 2**-7 + 2**-14 - 1]
    assert less_one.dtype == (torch.float64 if dtype == torch.float32 else torch.float32)
    assert torch.equal(ONE_SUBTRACTED.split(less_one, [4], {})[0].to(dtype), scale)


def test_gate_comes_before_up():
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    assert ONE_BELOW_THE_OTHER.join([gate, up], {}).flatten().tolist() == [1, 2, 3, 4]
    parts = ONE_BELOW_THE_OTHER.split(torch.cat([gate, up]), [2, 2], {})
    assert [part.flatten().tolist() for part in parts] == [[1, 2], [3, 4]]


def test_pieces_follow_the_rows_of_the_whole():
    """2 groups; queries have 3 rows per group, keys and values 1; at most 2 rows at once."""
    found = [(rows.part, rows.first, rows.count) for rows in GROUPED_QKV.blocks([6, 2, 2], {"groups": 2}, 2)]
    assert found == [
        *((0, 0, 2), (0, 2, 1), (1, 0, 1), (2, 0, 1)),
        *((0, 3, 2), (0, 5, 1), (1, 1, 1), (2, 1, 1)),
    ]


@pytest.mark.parametrize("side", ["to_megatron", "to_hf"])
def test_every_unmatched_name_is_listed(side):
    family = family_for(TINY)
    tensors = tiny_tensors()
    if side == "to_hf":
        tensors = dict(family.to_megatron(tensors))
    names = sorted(tensors)
    del tensors[names[0]], tensors[names[1]]
    tensors |= {"left.over": torch.empty(1), "also.left": torch.empty(1)}
    with pytest.raises(UserError) as error:
        dict(getattr(family, side)(tensors))
    assert f"missing: {names[0]}, {names[1]}; not known: also.left, left.over" in str(error.value)


def test_a_mismatch_of_many_layers_is_one_short_message():
    family = family_for(TINY | {"num_hidden_layers": 28})
    with pytest.raises(
        UserError, match=r"missing: model\.layers\.1\.\S+, .*, \.\.\. \(324 in all\)$"
    ) as error:
        family.check_hf({name: tensor.shape for name, tensor in tiny_tensors().items()})
    assert len(str(error.value)) < 600


def test_other_shapes_are_refused_in_both_directions():
    family = family_for(TINY)
    with pytest.raises(UserError, match=r"mlp.up_proj.weight is \[2, 4\], config.json says \[3, 4\]"):
        dict(family.to_megatron(tiny_tensors(**{"model.layers.0.mlp.up_proj.weight": (2, 4)})))
    megatron = dict(family.to_megatron(tiny_tensors()))
    megatron["decoder.layers.0.mlp.linear_fc1.weight"] = torch.empty(8, 4)
    with pytest.raises(UserError, match=r"linear_fc1.weight is \[8, 4\], config.json says \[6, 4\]"):
        dict(family.to_hf(megatron))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Llama"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"hidden_size": None}, "hidden_size"),
        (MIXED_LAYERS, r"mlp_only_layers=\[0\]"),
        (
            {**EXPERTS, "shared_expert_intermediate_size": 3},
            "shared_expert_intermediate_size=3 is no multiple of moe_intermediate_size=2",
        ),
    ],
)
def test_configs_that_would_convert_wrongly_are_refused(change, message):
    config = {key: value for key, value in (TINY | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        family_for(config)


OF_MODEL = {
    "qwen2.5-vl": [
        ({"vision_config": None}, "has no vision_config"),
        ({"vision_config": {"depth": 1}}, "has no hidden_size"),
    ],
    "gemma3": [
        ({"layer_types": ["full_attention"] * 4}, "every sixth layer of Gemma 3 has full attention, here"),
        ({"sliding_window_pattern": 2}, "here it is"),
    ],
    "deepseek-v3": [
        ({"kv_lora_rank": None}, "has no kv_lora_rank"),
        ({"v_head_dim": 8}, "v_head_dim=8 differs from qk_nope_head_dim=12; only models"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not DeepSeek-V3's sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not DeepSeek-V3's 1"),
    ],
    "glm-4.5": [({"n_shared_experts": 2}, "n_shared_experts=2 is not GLM-4.5's 1; Megatron-Bridge builds")],
    "qwen3.5": [
        ({"attn_output_gate": False}, "attn_output_gate=False is not Qwen3.5's True"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers of 4"),
    ],
    "gpt-oss": [
        ({"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not gpt-oss's 7.0"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types="),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            "rope_type=default is not gpt-oss's",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *case) for name, cases in OF_MODEL.items() for case in cases]
)
def test_configs_of_other_models_of_a_family_are_refused(name, change, message):
    config = {k: v for k, v in (CONFIGS[name]().to_dict() | change).items() if v is not None}
    with pytest.raises(UserError, match=message):
        family_for(config)


def test_planner_counts_what_the_table_lists(family_name):
    family = family_for(CONFIGS[family_name]().to_dict())
    assert model_parameters(family.spec) == sum(map(math.prod, family.hf_shapes.values()))


@pytest.mark.parametrize(
    ("key", "fits", "beyond"),
    [
        ("attention_dropout", [0, 0.5, 1], [-0.1, 1.5, True]),
        ("num_hidden_layers", [1, 1000], [0, 1001, 1.0]),
        ("rope_theta", [1e-9, 10_000], [0, -1.0, "1e6"]),
        ("max_position_embeddings", [1, 1 << 31], [0, (1 << 31) + 1]),
    ],
)
def test_numbers_of_a_config_have_bounds(key, fits, beyond):
    for value in fits:
        assert checked({key: value}, "m") == {key: value}
    for value in beyond:
        with pytest.raises(UserError, match=rf"config.json of m: {key}=.* is not .*; download it again"):
            checked({key: value}, "m")


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
