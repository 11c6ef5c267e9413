"""Qwen2, Qwen2.5, Qwen2.5-Math and DeepSeek-R1-Distill-Qwen: biases on queries, keys and values."""

from __future__ import annotations

from nemo_grpo.families.declaration import Declaration

FAMILY = Declaration("Qwen2ForCausalLM", "qwen2", has_qkv_bias=True)
