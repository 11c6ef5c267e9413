"""GLM-4.5, 4.6 and 4.7: a few dense layers, then routed experts and a shared one; half of each head rotates.

Names and common settings are Megatron-Bridge's. GLM-4.5-Air has no norms on queries and keys. The heads for
multi-token prediction, which published checkpoints keep after the last layer, are left out.
"""

from collections.abc import Mapping
from typing import Any

from nemo_grpo.models.deepseek_v3 import LAYERS, dense_then_experts, layer_kinds, refuse_others
from nemo_grpo.models.family_spec import FamilySpec, no_window
from nemo_grpo.models.shared_mappings import Entry, attention, embeddings
from nemo_grpo.models.spec import ModelSpec

_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_FIXED = {"n_shared_experts": 1, "norm_topk_prob": True, "tie_word_embeddings": False}


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes by letter: ``fd`` is the width of the dense layers, ``fs`` that of the shared expert."""
    return {"fd": config["intermediate_size"], "fs": config["moe_intermediate_size"]}


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    return (
        *embeddings(spec.tied_embeddings),
        *attention(spec.has_qkv_bias, spec.has_qk_norm),
        *dense_then_experts(spec),
    )


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    refuse_others(config, _FIXED, "GLM-4.5")
    return {
        "_target_": _PROVIDER,
        "transformer_layer_spec": LAYERS,
        "rotary_percent": spec.rope["partial_rotary_factor"],
        **layer_kinds(config),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "moe_router_pre_softmax": False,
        "moe_aux_loss_coeff": 0.001,
    }


FAMILY = FamilySpec(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    has_qkv_bias="attention_bias",
    has_qk_norm="use_qk_norm",
    is_computed=False,
    defaults={
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    stacks_layers=False,
    table=_table,
    sizes=_sizes,
    settings=_settings,
    window=no_window,
)
