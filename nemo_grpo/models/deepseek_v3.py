"""DeepSeek-V3, R1 and Moonlight: latent attention, a few dense layers, then routed and shared experts.

Names and common settings are Megatron-Bridge's. Layers differ, so a checkpoint stacks only the experts. The
heads for multi-token prediction, which published checkpoints keep after the last layer, are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_grpo.models.family_spec import FamilySpec, no_window
from nemo_grpo.models.shared_mappings import Entry, embeddings, gated, gated_mlp, layer_copy, routed_experts
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_PROVIDER = "megatron.bridge.models.mla_provider.MLAModelProvider"
LAYERS = {
    "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
    "_partial_": True,
    "use_transformer_engine": True,
}
"""Provider's setting for a model whose layers differ, as Megatron-Bridge writes it."""
_FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "tie_word_embeddings": False,
}
"""Values of config.json that Megatron-Bridge assumes without reading them."""
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Keys of config.json's YaRN section -> settings of Megatron-Bridge's provider."""
_NO_SCALING = {"rotary_scaling_factor": 1.0, "mscale_all_dim": 1.0}
"""Settings that switch scaling off where config.json has no YaRN: the provider's defaults would scale."""


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes by letter.

    qa  rank of the queries
    qb  all queries
    ka  rank of keys and values
    kp  rank of keys and values, plus the key's columns with positions
    kb  all keys and values
    fd  width of the dense feed-forward layers
    fs  width of all shared experts together
    """
    num_heads = int(config["num_attention_heads"])
    key_width = int(config["qk_nope_head_dim"])
    position_width = int(config["qk_rope_head_dim"])
    value_width = int(config["v_head_dim"])
    if value_width != key_width:
        raise UserError(
            f"config.json: v_head_dim={value_width} differs from qk_nope_head_dim={key_width}; only models "
            "in which they are equal are supported"
        )
    key_value_rank = int(config["kv_lora_rank"])
    return {
        "qa": int(config.get("q_lora_rank") or 0),
        "qb": num_heads * (key_width + position_width),
        "ka": key_value_rank,
        "kp": key_value_rank + position_width,
        "kb": num_heads * (key_width + value_width),
        "fd": int(config["intermediate_size"]),
        "fs": int(config["n_shared_experts"]) * int(config["moe_intermediate_size"]),
    }


def _latent_attention(has_query_rank: bool) -> tuple[Entry, ...]:
    """Map the input norm, latent attention and the output projection.

    Args: has_query_rank: queries are projected down to a rank and up again, not directly from the input.
    """
    entries = [layer_copy("input_layernorm.weight", "input_layernorm.weight", "h")]
    if has_query_rank:
        entries += [
            layer_copy("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "qa h"),
            _rank_norm("q", "qa"),
            layer_copy("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "qb qa"),
        ]
    else:
        entries += [layer_copy("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "qb h")]
    entries += [
        layer_copy(
            "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "kp h"
        ),
        _rank_norm("kv", "ka"),
        layer_copy("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "kb ka"),
        layer_copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "h q"),
    ]
    return tuple(entries)


def _rank_norm(projection: str, width: str) -> Entry:
    """Map the norm between the two projections of the queries (q), or of keys and values (kv)."""
    return layer_copy(
        f"self_attention.{projection}_layernorm.weight",
        f"self_attn.{projection}_a_layernorm.weight",
        width,
        fused=f"self_attention.linear_{projection}_up_proj.layer_norm_weight",
    )


def dense_then_experts(spec: ModelSpec) -> Iterator[Entry]:
    """Map the feed-forward layers: gated in the first layers, routed and shared experts in the others."""
    dense_layers = range(spec.num_dense_layers)
    sparse_layers = range(spec.num_dense_layers, spec.num_layers)
    yield from (replace(entry, layers=dense_layers) for entry in gated_mlp(width="fd"))
    yield from (replace(entry, layers=sparse_layers) for entry in _balanced_experts())


def _balanced_experts() -> tuple[Entry, ...]:
    """Map the norm, the router and its balancing bias, the routed experts and the shared experts."""
    bias = layer_copy("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "e")
    return (
        layer_copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h"),
        # Megatron adds steps of 1e-3 to biases of up to 10, which 16 bits would round away.
        replace(bias, keeps_dtype=True),
        *routed_experts(),
        *gated("mlp.shared_experts.", "mlp.shared_experts.", "fs"),
    )


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    latent = _latent_attention(has_query_rank=spec.query_rank > 0)
    return (*embeddings(spec.tied_embeddings), *latent, *dense_then_experts(spec))


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    refuse_others(config, _FIXED, "DeepSeek-V3")
    return {
        "_target_": _PROVIDER,
        "transformer_layer_spec": LAYERS,
        "kv_channels": None,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        **_scaling(spec.rope),
        **layer_kinds(config),
        "moe_shared_expert_intermediate_size": _sizes(config)["fs"],
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": config.get("aux_loss_alpha", 0.0001),
    }


def layer_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that tell dense layers from those with experts, and describe the sigmoid router."""
    num_layers = int(config["num_hidden_layers"])
    num_dense_layers = int(config.get("first_k_dense_replace") or 0)
    num_sparse_layers = num_layers - num_dense_layers
    return {
        "moe_layer_freq": [0] * num_dense_layers + [1] * num_sparse_layers,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": config.get("n_group"),
        "moe_router_group_topk": config.get("topk_group"),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_load_balancing_type": "seq_aux_loss",
    }


def refuse_others(config: Mapping[str, Any], fixed: Mapping[str, Any], model: str) -> None:
    """Refuse a config.json with settings that Megatron-Bridge does not build."""
    for key, value in fixed.items():
        if config.get(key, value) != value:
            shortened = str(config[key])[:80]
            raise UserError(
                f"config.json: {key}={shortened} is not {model}'s {value}; Megatron-Bridge builds no other"
            )


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "yarn":
        return _NO_SCALING
    return {key: rope[hf_key] for hf_key, key in _YARN.items() if rope.get(hf_key) is not None}


FAMILY = FamilySpec(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    is_computed=False,
    defaults={"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    stacks_layers=False,
    table=_table,
    sizes=_sizes,
    settings=_settings,
    window=no_window,
)
