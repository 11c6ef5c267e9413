"""Qwen3 (dense): norms on each head's queries and keys, no biases."""

from __future__ import annotations

from nemo_grpo.families.declaration import Declaration

FAMILY = Declaration("Qwen3ForCausalLM", "qwen3", has_qk_norm=True)
