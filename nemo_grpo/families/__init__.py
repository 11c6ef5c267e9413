"""Model families: what sets each apart, and which Hugging Face tensors make up which Megatron tensor.

To add one, declare it in `plain` or in a module of its own, and list the declaration in `FAMILIES`;
converters, planner, embedded engine and decoder all read it from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_grpo.errors import UserError
from nemo_grpo.families import deepseek_v3, gemma3, glm4_moe, gpt_oss, plain, qwen2_vl, qwen3_5
from nemo_grpo.families.declaration import Declaration, complete
from nemo_grpo.families.family import Family
from nemo_grpo.families.spec import ModelSpec
from nemo_grpo.families.values import checked

__all__ = ["COMPUTED", "FAMILIES", "Family", "ModelSpec", "family_for", "read_spec"]

FAMILIES: tuple[Declaration, ...] = (
    plain.LLAMA,
    plain.MISTRAL,
    plain.QWEN2,
    plain.QWEN3,
    plain.QWEN3_MOE,
    qwen2_vl.QWEN2_VL,
    qwen2_vl.QWEN2_5_VL,
    gemma3.FAMILY,
    deepseek_v3.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    *qwen3_5.FAMILIES,
)
CONVERTED = tuple(family for family in FAMILIES if family.table)
_REMEDY = "convert it with Megatron-Bridge's AutoBridge, which has a mapping"
_REFUSED = {
    **dict.fromkeys(
        [family.model_type for family in qwen3_5.FAMILIES],
        f"its layers of linear attention are planned, but neither converted nor computed here; {_REMEDY}",
    ),
    "nemotron_h": f"its Mamba-2 layers are neither planned nor converted here; {_REMEDY}",
    "glm4_moe_lite": "its values are wider than its keys (v_head_dim, qk_nope_head_dim), which is neither "
    f"planned nor converted here; {_REMEDY}",
}
"""Model types that Megatron-Bridge converts -> why they are not among the families."""
COMPUTED = tuple(family for family in FAMILIES if family.is_computed)
"""Those that the embedded engine and the decoder compute."""


def read_spec(
    config: Mapping[str, Any], name: str = "the model", among: Sequence[Declaration] = FAMILIES
) -> ModelSpec:
    """The model of a config.json's content.

    Raises: UserError: its family is not among these, or the config lacks a size.
    """
    return _declared(config, name, among).read(config, name)


def family_for(config: dict[str, Any]) -> Family:
    """The two-way table of a model, from the content of its config.json.

    Raises: UserError: see `read_spec`.
    """
    declaration, config = _declared(config, "the model", CONVERTED), checked(config, "the model")
    spec = declaration.read(config, "the model")
    assert declaration.table is not None
    with complete("the model"):
        settings = declaration.settings(config, spec) if declaration.settings else {}
    table = declaration.table(spec)
    return Family(config, spec, table, settings, stacks_layers=declaration.stacks_layers)


def _declared(config: Mapping[str, Any], name: str, among: Sequence[Declaration]) -> Declaration:
    """By the architecture, or by the model type where the config names none."""
    config = checked(config, name)
    key = "architecture" if config.get("architectures") else "model_type"
    wanted = config["architectures"][0] if key == "architecture" else config.get(key)
    for declaration in among:
        if getattr(declaration, key) == wanted:
            return declaration
    if why := _REFUSED.get(str(config.get("model_type"))):
        raise UserError(f"config.json of {name}: {key}={wanted} is not supported: {why}")
    supported = ", ".join(getattr(declaration, key) for declaration in among)
    raise UserError(f"config.json of {name}: {key}={wanted} is not supported; supported: {supported}")
