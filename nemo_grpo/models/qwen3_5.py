"""Qwen3.5: in three of four layers gated delta nets (2412.06464) replace attention.

The other layers' attention has a gate on its output, made by the queries' projection. Models with experts
have a gated shared one, too. Names and common settings are Megatron-Bridge's. Layers differ, so a checkpoint
does not stack them. The heads for multi-token prediction are left out. Models with a vision tower, as they
are published, are planned and not converted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_grpo.models.deepseek_v3 import refuse_others
from nemo_grpo.models.family_spec import FamilySpec, no_window
from nemo_grpo.models.ops import GATED_QKV, ONE_SUBTRACTED
from nemo_grpo.models.shared_mappings import (
    Entry,
    attention,
    embeddings,
    gated,
    gated_mlp,
    layer_copy,
    piece_name,
    routed_experts,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_INTERVAL = 4
"""Every so many layers one has full attention, unless config.json says another number."""
_LAYER_SPEC = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)
"""megatron-core's function that builds layers with delta nets."""
_QKV_ROWS = {"query": "lk", "key": "lk", "value": "lv"}
"""Blocks of rows of Hugging Face's fused tensors, in their order -> letters of their numbers of rows."""
_FIXED = {"hidden_act": "silu", "attn_output_gate": True}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULTS = {**_DELTA_NET, "head_dim": 256, "partial_rotary_factor": 0.25, "num_experts_per_tok": 8}
"""Values that transformers takes where config.json does not say."""


def _linear_layers(text_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Number the layers whose attention is a gated delta net."""
    num_layers = text_config["num_hidden_layers"]
    interval = text_config.get("full_attention_interval", _INTERVAL)
    default_kinds = [
        "full_attention" if number % interval == 0 else "linear_attention"
        for number in range(1, num_layers + 1)
    ]
    kinds = text_config.get("layer_types", default_kinds)
    if len(kinds) != num_layers:
        raise UserError(f"config.json: layer_types has {len(kinds)} layers of {num_layers}; correct it")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _linear_sizes(text_config: Mapping[str, Any]) -> tuple[int, int]:
    """Count the weights of a gated delta net: those that TP divides, and those on every rank."""
    hidden = text_config["hidden_size"]
    num_heads = text_config["linear_num_value_heads"]
    head_width = text_config["linear_value_head_dim"]
    keys = text_config["linear_num_key_heads"] * text_config["linear_key_head_dim"]
    values = num_heads * head_width
    # Rows of in_proj: queries and keys, values and their gates z, and beta and alpha of each head.
    input_projection = hidden * (2 * keys + 2 * values + 2 * num_heads)
    output_projection = values * hidden
    convolution = (2 * keys + values) * text_config["linear_conv_kernel_dim"]
    decays_and_biases = 2 * num_heads
    divided = input_projection + output_projection + convolution + decays_and_biases
    # The norm, as wide as one head, is on every rank.
    return divided, head_width


def _text_sizes(text_config: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes by letter.

    lk   delta net: all keys
    lv   delta net: all values
    lh   delta net: number of heads
    ld   delta net: width of one head's values
    lc   delta net: width of the convolution's kernel
    q2   attention: queries and their gates
    fs   experts: width of the shared one
    one  an axis of length 1
    """
    text_config = {**_DEFAULTS, **text_config}
    num_heads = text_config["linear_num_value_heads"]
    head_width = text_config["linear_value_head_dim"]
    return {
        "lk": text_config["linear_num_key_heads"] * text_config["linear_key_head_dim"],
        "lv": num_heads * head_width,
        "lh": num_heads,
        "ld": head_width,
        "lc": text_config["linear_conv_kernel_dim"],
        "q2": 2 * text_config["num_attention_heads"] * text_config["head_dim"],
        "fs": text_config.get("shared_expert_intermediate_size", 0),
        "one": 1,
    }


def _delta_net() -> Iterator[Entry]:
    """Map input norm, delta net and output projection.

    megatron-core stores the parts of its input projection and of its convolution under names of their own,
    such as ``in_proj.weight.query``, so that each is divided over tensor-parallel ranks by itself. Hugging
    Face has queries, keys and values in one tensor; its blocks of rows are named ``[query]``, ``[key]`` and
    ``[value]`` here.
    """
    in_megatron = "self_attention.in_proj.weight"
    in_hf = "linear_attn.in_proj"
    yield layer_copy("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight", "h")
    for block, rows in _QKV_ROWS.items():
        yield layer_copy(f"{in_megatron}.{block}", piece_name(f"{in_hf}_qkv.weight", block), f"{rows} h")
    yield layer_copy(f"{in_megatron}.z", f"{in_hf}_z.weight", "lv h")
    yield layer_copy(f"{in_megatron}.beta", f"{in_hf}_b.weight", "lh h")
    yield layer_copy(f"{in_megatron}.alpha", f"{in_hf}_a.weight", "lh h")
    for block, rows in _QKV_ROWS.items():
        yield layer_copy(
            f"self_attention.conv1d.weight.{block}",
            piece_name("linear_attn.conv1d.weight", block),
            f"{rows} one lc",
        )
    yield layer_copy("self_attention.A_log", "linear_attn.A_log", "lh")
    yield layer_copy("self_attention.dt_bias", "linear_attn.dt_bias", "lh")
    norm = layer_copy("self_attention.out_norm.weight", "linear_attn.norm.weight", "ld")
    # Hugging Face stores this norm's scale as w, all other norms' as w - 1, and Megatron every one as w - 1.
    yield replace(norm, op=ONE_SUBTRACTED)
    yield layer_copy("self_attention.out_proj.weight", "linear_attn.out_proj.weight", "h lv")


def _gated_attention() -> Iterator[Entry]:
    """Map attention with norms on queries and keys, whose queries come with their gates."""
    for entry in attention(qk_norm=True):
        if entry.megatron.endswith("linear_qkv.weight"):
            (queries, _), keys, values = entry.hf
            yield replace(entry, hf=((queries, "q2 h"), keys, values), op=GATED_QKV)
        else:
            yield entry


def _experts() -> Iterator[Entry]:
    yield layer_copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h")
    yield from routed_experts()
    yield from gated("mlp.shared_experts.", "mlp.shared_expert.", "fs")
    yield layer_copy("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one h")


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    attention_layers = [layer for layer in range(spec.num_layers) if layer not in spec.linear_layers]
    entries = list(embeddings(spec.tied_embeddings))
    entries += [replace(entry, layers=spec.linear_layers) for entry in _delta_net()]
    entries += [replace(entry, layers=attention_layers) for entry in _gated_attention()]
    entries += _experts() if spec.num_experts else gated_mlp()
    return tuple(entries)


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    refuse_others(config, _FIXED, "Qwen3.5")
    settings = {
        "transformer_layer_spec": {"_target_": _LAYER_SPEC, "_call_": False},
        # megatron-core's spelling. Without it layers of two kinds would be stacked under one key.
        "hetereogenous_dist_checkpoint": True,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": spec.rope["partial_rotary_factor"],
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in spec.linear_layers) for layer in range(spec.num_layers)],
    }
    settings |= {key: config.get(key, default) for key, default in _DELTA_NET.items()}
    if spec.num_experts:
        settings |= {
            "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_shared_expert_intermediate_size": spec.sizes["fs"],
            "moe_shared_expert_gate": True,
        }
    return settings


def _vision_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the vision tower's sizes by letter.

    w  width
    i  width of the MLP
    m  width of the patches that the merger joins
    o  width of the result
    p  numbers of one patch
    n  number of positions
    """
    vision = config["vision_config"]
    width = vision["hidden_size"]
    patch = vision["patch_size"]
    return {
        "w": width,
        "i": vision["intermediate_size"],
        "m": width * vision["spatial_merge_size"] ** 2,
        "o": vision["out_hidden_size"],
        "p": vision["in_channels"] * vision["temporal_patch_size"] * patch**2,
        "n": vision["num_position_embeddings"],
        "depth": vision["depth"],
    }


def _count_vision(sizes: Mapping[str, int]) -> int:
    """Count the parameters of the vision tower and its merger."""
    width = sizes["w"]
    mlp = sizes["i"]
    merged = sizes["m"]
    result = sizes["o"]
    patch_embedding = (sizes["p"] + 1) * width
    position_embedding = sizes["n"] * width
    # Queries, keys, values and output, each with a bias.
    attention_of_block = 4 * width * width + 4 * width
    mlp_of_block = 2 * width * mlp + mlp + width
    # Two layer norms with scale and bias.
    norms_of_block = 2 * 2 * width
    blocks = sizes["depth"] * (attention_of_block + mlp_of_block + norms_of_block)
    merger = 2 * width + (merged + 1) * merged + (merged + 1) * result
    return patch_embedding + position_embedding + blocks + merger


def _family(architecture: str, model_type: str, *, has_vision: bool) -> FamilySpec:
    return FamilySpec(
        architecture,
        model_type,
        has_qk_norm=True,
        fixed={"has_output_gate": True},
        is_computed=False,
        defaults=_DEFAULTS,
        stacks_layers=False,
        # transformers keeps these names in a text model that was taken out of one with a vision tower.
        aliases={"model.language_model.": "model."},
        table=None if has_vision else _table,
        sizes=_vision_sizes if has_vision else _text_sizes,
        settings=None if has_vision else _settings,
        vision_parameters=_count_vision if has_vision else None,
        window=no_window,
        linear_layers=_linear_layers,
        linear_sizes=_linear_sizes,
    )


FAMILIES = (
    _family("Qwen3_5ForCausalLM", "qwen3_5_text", has_vision=False),
    _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", has_vision=False),
    _family("Qwen3_5ForConditionalGeneration", "qwen3_5", has_vision=True),
    _family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", has_vision=True),
)
