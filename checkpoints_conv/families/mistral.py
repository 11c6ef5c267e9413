"""Mistral (dense)."""

from __future__ import annotations

from checkpoints_conv.families.declaration import Declaration

FAMILY = Declaration("MistralForCausalLM", "mistral")
