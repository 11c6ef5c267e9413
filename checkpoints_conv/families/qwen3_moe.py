"""Qwen3-MoE: every layer routes to gated experts."""

from __future__ import annotations

from typing import Any

from checkpoints_conv.families.parts import Entry, attention, embeddings, gated_experts
from nemo_grpo.errors import UserError

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"


def table(config: dict[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model.

    Raises: UserError: some layers are dense; Megatron stacks layers, so they must be alike.
    """
    dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if dense or every != 1:
        raise UserError(
            f"config.json has mlp_only_layers={dense}, decoder_sparse_step={every}; only models whose layers "
            "all have experts ([] and 1) are supported"
        )
    return (
        *embeddings(tied=config.get("tie_word_embeddings", False)),
        *attention(qk_norm=True),
        *gated_experts(),
    )
