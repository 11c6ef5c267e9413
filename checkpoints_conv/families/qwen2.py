"""Qwen2, Qwen2.5, Qwen2.5-Math and DeepSeek-R1-Distill-Qwen: biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from checkpoints_conv.families.parts import Entry, attention, embeddings, gated_mlp

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def table(config: dict[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model."""
    return (
        *embeddings(tied=config.get("tie_word_embeddings", False)),
        *attention(qkv_bias=True),
        *gated_mlp(),
    )
