"""Llama 3, 3.1, 3.2 (text) and 3.3. Rope scaling is no weight: it stays in the config on both sides."""

from __future__ import annotations

from typing import Any

from checkpoints_conv.families.parts import Entry, attention, embeddings, gated_mlp

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def table(config: dict[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model."""
    return (*embeddings(tied=config.get("tie_word_embeddings", False)), *attention(), *gated_mlp())
