"""gpt-oss: experts with [in, out] matrices, gate and up interleaved; biases; an attention sink for each head.

Published checkpoints have the experts in MXFP4, which is read as bf16; exports are bf16. Names and common
settings are Megatron-Bridge's.
"""

from collections.abc import Mapping
from typing import Any

from nemo_grpo.models.deepseek_v3 import refuse_others
from nemo_grpo.models.family_spec import SLIDING, FamilySpec
from nemo_grpo.models.ops import GATE_UP_IN_TURNS, ONE_BELOW_THE_OTHER, TRANSPOSED, Op
from nemo_grpo.models.shared_mappings import (
    HF_LAYER,
    LAYER,
    Entry,
    attention,
    embeddings,
    layer_copy,
    norm_before_experts,
    piece_name,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_FIXED = {
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_UNSTATED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Values of YaRN that transformers takes where config.json has none."""
_WINDOW = 128
"""Positions of the windows where config.json does not say."""
_UNCHANGED_KEYS = ("original_max_position_embeddings", "beta_fast", "beta_slow")
"""Keys of YaRN that Megatron-Bridge's provider has under the same name after ``yarn_``."""


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes by letter: ``a`` is the number of heads, ``f2`` the width of gate and up together."""
    return {"a": config["num_attention_heads"], "f2": 2 * config["intermediate_size"]}


def _expert(layer: str, hf: str, weight: str, bias: str, op: Op, bias_op: Op) -> tuple[Entry, Entry]:
    """Map the weight and the bias of one matrix of an expert.

    Each is a slice of a Hugging Face tensor that holds all experts of a layer.

    Args:
        layer: name of the matrix in Megatron.
        hf: name of the matrix in Hugging Face.
        weight: shape of the weight's slice, in letters.
        bias: shape of the bias's slice, in letters.
        op: operation that makes Megatron's weight.
        bias_op: operation that makes Megatron's bias.
    """
    megatron = f"{LAYER}mlp.experts.local_experts.{{expert}}.{layer}"
    hf_weight = piece_name(f"{HF_LAYER}mlp.experts.{hf}", "{expert}")
    hf_bias = piece_name(f"{HF_LAYER}mlp.experts.{hf}_bias", "{expert}")
    return (
        Entry(f"{megatron}.weight", ((hf_weight, weight),), op),
        Entry(f"{megatron}.bias", ((hf_bias, bias),), bias_op),
    )


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    return (
        *embeddings(spec.tied_embeddings),
        *attention(qkv_bias=True),
        layer_copy("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "h"),
        layer_copy("self_attention.core_attention.softmax_offset", "self_attn.sinks", "a"),
        norm_before_experts(),
        layer_copy("mlp.router.weight", "mlp.router.weight", "e h"),
        layer_copy("mlp.router.bias", "mlp.router.bias", "e"),
        *_expert("linear_fc1", "gate_up_proj", "h f2", "f2", GATE_UP_IN_TURNS, GATE_UP_IN_TURNS),
        *_expert("linear_fc2", "down_proj", "f h", "h", TRANSPOSED, ONE_BELOW_THE_OTHER),
    )


def _window(text_config: Mapping[str, Any]) -> int | None:
    """Read the window; None if no layer has one."""
    window: int | None = text_config.get("sliding_window", _WINDOW)
    return window if SLIDING in text_config.get("layer_types", [SLIDING]) else None


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    layer_types = [SLIDING if layer % 2 == 0 else "full_attention" for layer in range(num_layers)]
    refuse_others(config, {**_FIXED, "layer_types": layer_types}, "gpt-oss")
    # An absent YaRN key counts with transformers' default, or as None, which is refused, if it has none.
    rope: dict[str, Any] = dict.fromkeys(_YARN)
    rope |= _UNSTATED
    rope |= spec.rope
    refuse_others(rope, _YARN, "gpt-oss")
    window = config.get("sliding_window", _WINDOW)
    if not window:
        raise UserError(f"config.json: sliding_window={window}, and gpt-oss needs one; download it again")
    return {
        "add_bias_linear": True,
        # add_bias_linear includes the biases of queries, keys and values.
        "add_qkv_bias": False,
        "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False},
        "activation_func_clamp_value": _FIXED["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        # Positions before and after a token; config.json's window also counts the token itself.
        "window_size": [window - 1, 0],
        "window_attn_skip_freq": 2,
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": _YARN["factor"],
        # Published models have YaRN's values fixed, and a config.json with others was refused above.
        **{f"yarn_{key}": _YARN[key] for key in _UNCHANGED_KEYS},
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": _YARN["truncate"],
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "bias_dropout_fusion": False,
    }


FAMILY = FamilySpec(
    "GptOssForCausalLM",
    "gpt_oss",
    has_qkv_bias="attention_bias",
    fixed={"has_all_biases": True, "has_sinks": True},
    is_computed=False,
    defaults={
        "rope_theta": 150000.0,
        "rope_parameters": _YARN,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
    },
    expert_width="intermediate_size",
    table=_table,
    sizes=_sizes,
    settings=_settings,
    window=_window,
)
