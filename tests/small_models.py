"""Configurations of tiny models, a family each; a test changes only the sizes that it is about."""

from __future__ import annotations

from typing import Any

import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
}
TRAINED = tuple(family for family in FAMILIES if family != "qwen3-moe")
"""Those that the embedded engine trains."""


def small_config(family: str = "qwen2-tied", **changes: Any) -> Any:
    """The configuration of a family's tiny model."""
    make, own = FAMILIES[family]
    return make(**SIZES | own | changes)
