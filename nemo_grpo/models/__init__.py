"""Model families: their properties, and the Hugging Face tensors that make up each Megatron tensor.

To add a family, declare it in `FAMILIES`, or declare it in a module of its own and list it there. Converters,
planner, embedded engine and decoder all read `FAMILIES`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_grpo.models import deepseek_v3, gemma3, glm4_moe, gpt_oss, qwen2_vl, qwen3_5
from nemo_grpo.models.config_validation import checked
from nemo_grpo.models.family import Family
from nemo_grpo.models.family_spec import (
    FamilySpec,
    complete,
    no_window,
    window_if_used,
    window_of_every_layer,
    window_of_later_layers,
)
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

__all__ = ["COMPUTED", "FAMILIES", "Family", "ModelSpec", "family_for", "read_spec", "refuse_uncomputed"]

_WINDOW_LAYERS = {"max_window_layers": 28}
"""Value that transformers takes where config.json does not say."""
FAMILIES: tuple[FamilySpec, ...] = (
    # Llama 3, 3.1, 3.2 (text) and 3.3
    FamilySpec("LlamaForCausalLM", "llama", window=no_window),
    FamilySpec("MistralForCausalLM", "mistral", window=window_of_every_layer),
    # Qwen2, Qwen2.5, Qwen2.5-Math and DeepSeek-R1-Distill-Qwen
    FamilySpec(
        "Qwen2ForCausalLM",
        "qwen2",
        has_qkv_bias=True,
        defaults=_WINDOW_LAYERS,
        window=window_of_later_layers,
    ),
    FamilySpec(
        "Qwen3ForCausalLM",
        "qwen3",
        has_qk_norm=True,
        defaults=_WINDOW_LAYERS,
        window=window_of_later_layers,
    ),
    FamilySpec(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        has_qk_norm=True,
        is_computed=False,
        defaults={"num_experts_per_tok": 8},
        window=window_if_used,
    ),
    qwen2_vl.QWEN2_VL,
    qwen2_vl.QWEN2_5_VL,
    gemma3.FAMILY,
    deepseek_v3.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    *qwen3_5.FAMILIES,
)
CONVERTED = tuple(family for family in FAMILIES if family.table)
_BY_BRIDGE = (
    'neither planned nor converted here; Megatron-Bridge converts it: python -c "from megatron.bridge import '
    "AutoBridge; AutoBridge.import_ckpt('MODEL', 'CHECKPOINT')\", and export_ckpt back"
)
_AS_TEXT = (
    'its vision tower is planned, but not converted here; convert the text model that python -c "from '
    "transformers import AutoModelForCausalLM as M; M.from_pretrained('MODEL', dtype='auto')"
    ".save_pretrained('TEXT')\" makes, or both with Megatron-Bridge's AutoBridge"
)
_DELTA_NETS = (
    "neither the embedded engine nor the decoder computes its gated delta nets (linear attention); train it "
    "with NeMo-RL (nemo-grpo launch)"
)
_REFUSED = {
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": _DELTA_NETS,
    "qwen3_5": _AS_TEXT,
    "qwen3_5_moe": _AS_TEXT,
    "nemotron_h": f"its Mamba-2 layers are {_BY_BRIDGE}",
    "glm4_moe_lite": f"values wider than keys (v_head_dim, qk_nope_head_dim) are {_BY_BRIDGE}",
    "glm_moe_dsa": f"its sparse attention is {_BY_BRIDGE}",
    "deepseek_v4": f"its compressed attention is {_BY_BRIDGE}",
    "gemma4": f"its layers of several shapes are {_BY_BRIDGE}",
    "gemma4_text": f"its layers of several shapes are {_BY_BRIDGE}",
    "kimi_k25": f"its 4-bit experts and vision tower are {_BY_BRIDGE}",
    "kimi_k3": f"its delta attention is {_BY_BRIDGE}, in a release after 0.6.2",
}
"""Unsupported model types -> reason and remedy."""
COMPUTED = tuple(family for family in FAMILIES if family.is_computed)
"""Families that the embedded engine and the decoder compute."""


def read_spec(
    config: Mapping[str, Any], name: str = "the model", among: Sequence[FamilySpec] = FAMILIES
) -> ModelSpec:
    """Read the model that a config.json describes."""
    return _declared(config, name, among).read(config, name)


def refuse_uncomputed(spec: ModelSpec) -> None:
    """Refuse settings that the embedded engine does not compute, in a model whose family it computes."""
    # The config.json of a Llama or Qwen can still ask for something that only other families use.
    reason = None
    if spec.hidden_act != "silu":
        reason = f"hidden_act={spec.hidden_act!r} is not supported by the embedded engine, which has silu"
    elif spec.rope["rope_type"] not in ("default", "llama3"):
        reason = f"rope scaling {spec.rope['rope_type']!r} is not supported by the embedded engine"
    elif spec.sliding_window:
        reason = f"sliding_window={spec.sliding_window} is not supported by the embedded engine"
    if reason is not None:
        raise UserError(f"{spec.name}: {reason}; train the model with NeMo-RL (nemo-grpo launch)")


def family_for(config: dict[str, Any]) -> Family:
    """Build a model's two-way table from the content of its config.json."""
    declaration = _declared(config, "the model", CONVERTED)
    config = checked(config, "the model")
    # Reading the config's values and building the table can both miss a key.
    with complete("the model"):
        return Family(config, declaration.read(config, "the model"), declaration)


def _declared(config: Mapping[str, Any], name: str, among: Sequence[FamilySpec]) -> FamilySpec:
    """Find the family by its architecture, or by its model type where the config has none."""
    config = checked(config, name)
    key = "architecture" if config.get("architectures") else "model_type"
    family_name = config["architectures"][0] if key == "architecture" else config.get(key)
    for declaration in among:
        if getattr(declaration, key) == family_name:
            return declaration
    reason = _REFUSED.get(str(config.get("model_type")))
    if reason is not None:
        raise UserError(f"config.json of {name}: {key}={family_name} is not supported: {reason}")
    supported = ", ".join(getattr(declaration, key) for declaration in among)
    raise UserError(f"config.json of {name}: {key}={family_name} is not supported; supported: {supported}")
