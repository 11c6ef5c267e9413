"""Checks of a config.json's values, once, before any family reads them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_grpo.support.errors import UserError

MAX_TENSORS = 65_536
"""Most layers times experts; a larger table would not fit into memory."""


@dataclass(frozen=True)
class _Kind:
    """Values of one kind.

    Attributes:
        words: description for messages.
        accepts: function that is True for a value of the kind.
    """

    words: str
    accepts: Callable[[Any], bool]


def _whole_number(least: int, most: int) -> _Kind:
    def accepts(value: Any) -> bool:
        # Not isinstance: Python's booleans are integers, too.
        return type(value) is int and least <= value <= most

    return _Kind(f"a whole number from {least} to {most}", accepts)


def _list_of(item_type: type) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is item_type for item in value)

    return accepts


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


# Upper limits are far above any model's: a damaged file must not make the table fill the memory.
_SIZE = _whole_number(1, 1 << 24)
_COUNT = _whole_number(0, 1 << 24)
_SMALL_COUNT = _whole_number(0, 10_000)
_LENGTH = _whole_number(1, 1 << 31)
_NUM_LAYERS = _whole_number(1, 1000)
_NUMBER = _Kind("a finite number", _is_number)
_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_SHARE = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TEXTS = _Kind("a list of texts", _list_of(str))
_NUMBERS = _Kind("a list of whole numbers", _list_of(int))
_SECTION = _Kind("an object", lambda value: isinstance(value, dict))

# Keys that are not listed pass unchecked.
_KEYS: dict[_Kind, str] = {
    _NUM_LAYERS: "num_hidden_layers depth",
    _SIZE: "hidden_size num_attention_heads num_key_value_heads vocab_size intermediate_size "
    "moe_intermediate_size embed_dim out_hidden_size patch_size temporal_patch_size in_channels "
    "spatial_merge_size qk_nope_head_dim kv_lora_rank v_head_dim head_dim num_heads linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "num_position_embeddings mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel "
    "full_attention_interval sliding_window_pattern _sliding_window_pattern chunk_size mlp_ratio",
    _COUNT: "sliding_window q_lora_rank qk_rope_head_dim moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size moe_latent_size",
    _SMALL_COUNT: "num_experts num_local_experts n_routed_experts num_experts_per_tok n_shared_experts "
    "first_k_dense_replace n_group topk_group num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers "
    "decoder_sparse_step moe_layer_freq max_window_layers",
    _LENGTH: "max_position_embeddings original_max_position_embeddings",
    _POSITIVE: "rope_theta rope_local_base_freq rms_norm_eps layer_norm_epsilon query_pre_attn_scalar factor "
    "low_freq_factor high_freq_factor swiglu_limit swiglu_alpha final_logit_softcapping "
    "attn_logit_softcapping",
    _SHARE: "partial_rotary_factor attention_dropout",
    _NUMBER: "beta_fast beta_slow mscale mscale_all_dim initializer_range routed_scaling_factor "
    "aux_loss_alpha router_aux_loss_coef",
    _FLAG: "tie_word_embeddings attention_bias mlp_bias use_bias mamba_proj_bias use_conv_bias use_qk_norm "
    "use_sliding_window norm_topk_prob rope_interleave truncate attn_output_gate residual_in_fp32",
    _TEXT: "model_type hidden_act hidden_activation mlp_hidden_act mamba_hidden_act rope_type type "
    "scoring_func topk_method hybrid_override_pattern",
    _TEXTS: "architectures layer_types layers_block_type",
    _NUMBERS: "mrope_section mlp_only_layers",
    _SECTION: "text_config vision_config rope_parameters rope_scaling full_attention sliding_attention",
}
_NULLABLE = {"sliding_window"}
"""Keys whose null is a value: transformers takes its default only where the key is missing."""
_KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}


def checked(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Check the values of a config.json, and remove its nulls.

    A null means the same as a missing key, except for the keys in `_NULLABLE`, which keep theirs.

    Args:
        config: content of config.json.
        name: the model's name, for messages.
    """
    return _checked(config, f"config.json of {name}: ")


def _checked(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in section.items():
        if value is None:
            if key in _NULLABLE:
                values[key] = None
            continue
        kind = _KINDS.get(key)
        if kind is not None and not kind.accepts(value):
            raise UserError(f"{where}{key}={value!r:.60} is not {kind.words}; download it again")
        values[key] = _checked(value, f"{where}{key}.") if kind is _SECTION else value
    return values
