"""Qwen3-MoE: every layer routes to gated experts."""

from __future__ import annotations

from nemo_grpo.families.declaration import Declaration

FAMILY = Declaration("Qwen3MoeForCausalLM", "qwen3_moe", has_qk_norm=True, is_computed=False)
