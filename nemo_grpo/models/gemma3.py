"""Gemma 3, text: most layers see a window; attention and MLP are followed by norms, too.

Its norms scale by 1 + w, which Hugging Face and Megatron-Bridge both store as w.
"""

from collections.abc import Mapping
from typing import Any

from nemo_grpo.models.family_spec import DEFAULT_WINDOW, SLIDING, FamilySpec, rotary
from nemo_grpo.models.shared_mappings import Entry, attention, embeddings, gated_mlp, layer_copy
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_PROVIDER = "megatron.bridge.models.gemma.gemma3_provider.Gemma3ModelProvider"
_PERIOD = 6
"""Layers per period: the last sees everything, the others a window."""


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    return (
        *embeddings(spec.tied_embeddings),
        *attention(qk_norm=True),
        layer_copy(
            "self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", "h"
        ),
        *gated_mlp("pre_feedforward_layernorm.weight"),
        layer_copy("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight", "h"),
    )


def _rope(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary parameters of the layers without a window.

    In Gemma 3 ``rope_scaling`` is added to ``rope_parameters``; in other families it replaces them.
    """
    without_scaling = {"full_attention": {"rope_type": "default"}}
    parameters = text_config.get("rope_parameters", without_scaling).get("full_attention", {})
    scaling = {**parameters, **text_config.get("rope_scaling", {})}
    return rotary({**text_config, "rope_scaling": scaling, "rope_parameters": {}})


def _window(text_config: Mapping[str, Any]) -> int | None:
    """Read the window; None if no layer has one."""
    period = text_config.get("sliding_window_pattern", _PERIOD)
    layer_types = text_config.get("layer_types", _layer_types(text_config["num_hidden_layers"], period))
    window: int | None = text_config.get("sliding_window", DEFAULT_WINDOW)
    return window if SLIDING in layer_types else None


def _layer_types(num_layers: int, period: int) -> list[str]:
    """List the kinds of layers: the last of each period has full attention."""
    return ["full_attention" if n % period == 0 else SLIDING for n in range(1, num_layers + 1)]


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    _check_layers(config)
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if not window:
        raise UserError(f"config.json: sliding_window={window}, and Gemma 3 needs one; download it again")
    rope_of_windows = config.get("rope_parameters", {}).get("sliding_attention", {})
    # transformers 5 writes the base with the layers' kind, earlier versions as a key of its own.
    local_base = rope_of_windows.get("rope_theta") or config.get("rope_local_base_freq") or 10_000.0
    return {
        "_target_": _PROVIDER,
        "layernorm_zero_centered_gamma": True,
        "rotary_base": [local_base, spec.rope["rope_theta"]],
        "rope_scaling_factor": float(spec.rope["factor"] if spec.rope["rope_type"] == "linear" else 1.0),
        "window_size": window,
        "softmax_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
    }


def _check_layers(config: Mapping[str, Any]) -> None:
    """Refuse a pattern of layers that is not the published one, which Megatron-Bridge builds."""
    layer_types = config.get("layer_types") or []
    expected = _layer_types(len(layer_types), _PERIOD)
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PERIOD
    if period != _PERIOD or layer_types != expected:
        raise UserError(
            "config.json: every sixth layer of Gemma 3 has full attention, here it is "
            f"{layer_types or period}; Megatron-Bridge builds no other"
        )


FAMILY = FamilySpec(
    "Gemma3ForCausalLM",
    "gemma3_text",
    has_qk_norm=True,
    fixed={"has_post_norms": True},
    is_computed=False,
    defaults={
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    table=_table,
    settings=_settings,
    rope=_rope,
    window=_window,
    activation="hidden_activation",
    lost_keys=("final_logit_softcapping", "attn_logit_softcapping"),
)
