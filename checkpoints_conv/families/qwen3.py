"""Qwen3 (dense): norms on each head's queries and keys, no biases."""

from __future__ import annotations

from typing import Any

from checkpoints_conv.families.parts import Entry, attention, embeddings, gated_mlp

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def table(config: dict[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model."""
    return (
        *embeddings(tied=config.get("tie_word_embeddings", False)),
        *attention(qk_norm=True),
        *gated_mlp(),
    )
