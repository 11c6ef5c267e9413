"""Qwen3.5, for the planner alone: in three of four layers gated delta nets (2412.06464) replace attention.

The others' attention has a gate on its output, made by the queries' projection; with experts there is a
shared one, gated, too.
"""

import math
from collections.abc import Mapping
from typing import Any

from nemo_grpo.errors import UserError
from nemo_grpo.families.declaration import Declaration

_INTERVAL = 4
"""Where config.json does not say: of so many layers the last has attention."""


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


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Vision tower: w width, i MLP, m merged patches, o result, p numbers of a patch, n positions."""
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


def _family(architecture: str, model_type: str, *, sees: bool) -> Declaration:
    return Declaration(
        architecture,
        model_type,
        has_qk_norm=True,
        has_output_gate=True,
        is_computed=False,
        defaults={"partial_rotary_factor": 0.25},
        table=None,
        sizes=_sizes if sees else None,
        vision_parameters=_vision if sees else None,
        linear_layers=_linear_layers,
        linear_sizes=_linear_sizes,
    )


FAMILIES = (
    _family("Qwen3_5ForCausalLM", "qwen3_5_text", sees=False),
    _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", sees=False),
    _family("Qwen3_5ForConditionalGeneration", "qwen3_5", sees=True),
    _family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", sees=True),
)
