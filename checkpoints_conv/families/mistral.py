"""Mistral (dense)."""

from __future__ import annotations

from typing import Any

from checkpoints_conv.families.parts import Entry, attention, embeddings, gated_mlp

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"


def table(config: dict[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model."""
    return (*embeddings(tied=config.get("tie_word_embeddings", False)), *attention(), *gated_mlp())
