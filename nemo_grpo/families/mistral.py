"""Mistral (dense)."""

from __future__ import annotations

from nemo_grpo.families.declaration import Declaration

FAMILY = Declaration("MistralForCausalLM", "mistral")
