"""Model families: which Hugging Face tensors make up which Megatron tensor, one short table each.

To add one, write a module like `qwen2` (a name, a table from `parts`) and list it in `FAMILIES`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from checkpoints_conv.families import llama, mistral, qwen2, qwen3, qwen3_moe
from checkpoints_conv.families.family import Family
from nemo_grpo.errors import UserError

__all__ = ["FAMILIES", "Family", "family_for"]

FAMILIES: tuple[ModuleType, ...] = (llama, mistral, qwen2, qwen3, qwen3_moe)


def family_for(hf_config: dict[str, Any]) -> Family:
    """The two-way table of a model, from the content of its config.json.

    Raises: UserError: the architecture is not supported, or a size is missing from the config.
    """
    architectures = hf_config.get("architectures") or []
    model_type = hf_config.get("model_type")
    for module in FAMILIES:
        if (architectures and architectures[0] == module.ARCHITECTURE) or (
            not architectures and model_type == module.MODEL_TYPE
        ):
            return Family(hf_config, module.table(hf_config))
    found = architectures[0] if architectures else f"model_type={model_type!r}"
    supported = ", ".join(module.ARCHITECTURE for module in FAMILIES)
    raise UserError(f"config.json: architecture {found} is not supported; supported: {supported}")
