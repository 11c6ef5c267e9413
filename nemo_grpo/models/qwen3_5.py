"""Qwen3.5: in three of four layers gated delta nets (2412.06464) replace attention.

The other layers' attention has a gate on its output, made by the queries' projection. Models with experts
have a gated shared one, too. Names and common settings are Megatron-Bridge's. Layers differ, so a checkpoint
does not stack them. The heads for multi-token prediction are left out. Models with a vision tower, as they
are published, are planned and not converted.
"""

import math
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
    routed_experts,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_INTERVAL = 4
"""Layers from one with attention to the next; config.json may set it."""
_LAYERS = "megatron.core.models.gpt.experimental_attention_variant_module_specs."
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


def _linear_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    count, interval = text["num_hidden_layers"], text.get("full_attention_interval", _INTERVAL)
    every = ["full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(count)]
    kinds = text.get("layer_types", every)
    if len(kinds) != count:
        raise UserError(f"config.json: layer_types has {len(kinds)} layers of {count}; correct it")
    return tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")


def _linear_sizes(text: Mapping[str, Any]) -> tuple[int, int]:
    """(weights that TP divides, weights on every rank) of a gated delta net.

    Projections h (2 key + 2 value + 2 heads) and value h, convolution (2 key + value) kernel, and decay and
    bias of each head; a norm of one head's width.
    """
    heads, width = text["linear_num_value_heads"], text["linear_value_head_dim"]
    key, value = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * width
    divided = text["hidden_size"] * (2 * key + 3 * value + 2 * heads)
    return divided + (2 * key + value) * text["linear_conv_kernel_dim"] + 2 * heads, width


def _text_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    """Sizes by letter.

    Delta net: lk all keys, lv all values, lh heads, ld width of one, lc kernel. q2 queries and gates, fs
    shared width.
    """
    text = {**_DEFAULTS, **text}
    heads, width = text["linear_num_value_heads"], text["linear_value_head_dim"]
    return {
        "lk": text["linear_num_key_heads"] * text["linear_key_head_dim"],
        "lv": heads * width,
        "lh": heads,
        "ld": width,
        "lc": text["linear_conv_kernel_dim"],
        "q2": 2 * text["num_attention_heads"] * text["head_dim"],
        "fs": text.get("shared_expert_intermediate_size", 0),
        "one": 1,
    }


def _delta_net() -> Iterator[Entry]:
    """Input norm, delta net, output projection; megatron-core stores the parts of a matrix separately."""
    megatron, hf = "self_attention.", "linear_attn."
    yield layer_copy(f"{megatron}in_proj.layer_norm_weight", "input_layernorm.weight", "h")
    rows = {"query": "lk", "key": "lk", "value": "lv"}
    parts = {f"qkv.weight[{name}]": (name, letter) for name, letter in rows.items()}
    parts |= {"z.weight": ("z", "lv"), "b.weight": ("beta", "lh"), "a.weight": ("alpha", "lh")}
    for name, (part, letter) in parts.items():
        yield layer_copy(f"{megatron}in_proj.weight.{part}", f"{hf}in_proj_{name}", f"{letter} h")
    for part, letter in rows.items():
        name = "conv1d.weight"
        yield layer_copy(f"{megatron}{name}.{part}", f"{hf}{name}[{part}]", f"{letter} one lc")
    yield layer_copy(f"{megatron}A_log", f"{hf}A_log", "lh")
    yield layer_copy(f"{megatron}dt_bias", f"{hf}dt_bias", "lh")
    norm = layer_copy(f"{megatron}out_norm.weight", f"{hf}norm.weight", "ld")
    yield replace(norm, op=ONE_SUBTRACTED)
    yield layer_copy(f"{megatron}out_proj.weight", f"{hf}out_proj.weight", "h lv")


def _gated_attention() -> Iterator[Entry]:
    """Attention with norms on queries and keys, whose queries come with their gates."""
    for entry in attention(qk_norm=True):
        if entry.megatron.endswith("linear_qkv.weight"):
            (queries, _), *others = entry.hf
            yield replace(entry, hf=((queries, "q2 h"), *others), op=GATED_QKV)
        else:
            yield entry


def _experts() -> Iterator[Entry]:
    yield layer_copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "h")
    yield from routed_experts()
    yield from gated("mlp.shared_experts.", "mlp.shared_expert.", "fs")
    yield layer_copy("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one h")


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    linear = spec.linear_layers
    attended = [layer for layer in range(spec.num_layers) if layer not in linear]
    return (
        *embeddings(spec.tied_embeddings),
        *(replace(entry, layers=linear) for entry in _delta_net()),
        *(replace(entry, layers=attended) for entry in _gated_attention()),
        *(_experts() if spec.num_experts else gated_mlp()),
    )


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    refuse_others(config, _FIXED, "Qwen3.5")
    experts = {
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_shared_expert_intermediate_size": spec.sizes["fs"],
        "moe_shared_expert_gate": True,
    }
    block = f"{_LAYERS}get_transformer_block_with_experimental_attention_variant_spec"
    return {
        "transformer_layer_spec": {"_target_": block, "_call_": False},
        "hetereogenous_dist_checkpoint": True,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": spec.rope["partial_rotary_factor"],
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(n in spec.linear_layers) for n in range(spec.num_layers)],
        **{key: config.get(key, value) for key, value in _DELTA_NET.items()},
        **(experts if spec.num_experts else {}),
    }


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the vision tower: w width, i MLP, m merged patches, o result, p one patch, n positions."""
    vision = config["vision_config"]
    width, patch = vision["hidden_size"], vision["patch_size"]
    return {
        "w": width,
        "i": vision["intermediate_size"],
        "m": width * vision["spatial_merge_size"] ** 2,
        "o": vision["out_hidden_size"],
        "p": vision["in_channels"] * vision["temporal_patch_size"] * patch**2,
        "n": vision["num_position_embeddings"],
        "depth": vision["depth"],
    }


def _vision(sizes: Mapping[str, int]) -> int:
    w, i, m, o = (sizes[letter] for letter in "wimo")
    block = math.prod((4, w, w)) + 2 * w * i + 4 * w + i + w + 4 * w  # matrices, their biases, two norms
    return (sizes["p"] + 1 + sizes["n"]) * w + sizes["depth"] * block + 2 * w + (m + 1) * (m + o)


def _family(architecture: str, model_type: str, *, sees: bool) -> FamilySpec:
    return FamilySpec(
        architecture,
        model_type,
        has_qk_norm=True,
        fixed={"has_output_gate": True},
        is_computed=False,
        defaults=_DEFAULTS,
        stacks_layers=False,
        aliases={"model.language_model.": "model."},  # of a text model taken out of one with vision
        table=None if sees else _table,
        sizes=_sizes if sees else _text_sizes,
        settings=None if sees else _settings,
        vision_parameters=_vision if sees else None,
        window=no_window,
        linear_layers=_linear_layers,
        linear_sizes=_linear_sizes,
    )


FAMILIES = (
    _family("Qwen3_5ForCausalLM", "qwen3_5_text", sees=False),
    _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", sees=False),
    _family("Qwen3_5ForConditionalGeneration", "qwen3_5", sees=True),
    _family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", sees=True),
)
