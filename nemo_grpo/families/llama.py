"""Llama 3, 3.1, 3.2 (text) and 3.3. Rope scaling is no weight: it stays in the config on both sides."""

from __future__ import annotations

from nemo_grpo.families.declaration import Declaration

FAMILY = Declaration("LlamaForCausalLM", "llama")
