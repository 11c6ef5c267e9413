"""The shape of a recipe's model: from its config.json, or from a table of published ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.model_folder import read_config
from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.families import ModelSpec, read_spec

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

# model_type, hidden, layers, heads, kv heads, ffn, vocabulary, tied, head_dim
_SIZES = {
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 4864, 151936, True, 64),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True, 128),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 11008, 151936, True, 128),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False, 128),
    "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 13824, 152064, False, 128),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 27648, 152064, False, 128),
    "qwen2.5-72b": ("qwen2", 8192, 80, 64, 8, 29568, 152064, False, 128),
    "r1-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, 151936, False, 128),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 3072, 151936, True, 128),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 6144, 151936, True, 128),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 9728, 151936, True, 128),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 12288, 151936, False, 128),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 17408, 151936, False, 128),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 25600, 151936, False, 128),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 48, 32, 4, 768, 151936, False, 128),
    "qwen3-235b-a22b": ("qwen3_moe", 4096, 94, 64, 4, 1536, 151936, False, 128),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, False, 128),
    "llama-3.1-70b": ("llama", 8192, 80, 64, 8, 28672, 128256, False, 128),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 8192, 128256, True, 64),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 8192, 128256, True, 128),
    "mistral-7b-v0.3": ("mistral", 4096, 32, 32, 8, 14336, 32768, False, 128),
    "qwen2-vl-2b": ("qwen2_vl", 1536, 28, 12, 2, 8960, 151936, True, 128),
    "qwen2.5-vl-3b": ("qwen2_5_vl", 2048, 36, 16, 2, 11008, 151936, True, 128),
}

_VISION = {
    "qwen2-vl-2b": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2.5-vl-3b": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
}

# size -> names on the Hub, each with its max_position_embeddings
_NAMES = {
    "qwen2.5-0.5b": {"Qwen/Qwen2.5-0.5B": 32768, "Qwen/Qwen2.5-0.5B-Instruct": 32768},
    "qwen2.5-1.5b": {"Qwen/Qwen2.5-1.5B": 131072, "Qwen/Qwen2.5-1.5B-Instruct": 32768,
        "Qwen/Qwen2.5-Math-1.5B": 4096, "Qwen/Qwen2.5-Math-1.5B-Instruct": 4096},
    "qwen2.5-3b": {"Qwen/Qwen2.5-3B": 32768, "Qwen/Qwen2.5-3B-Instruct": 32768},
    "qwen2.5-7b": {"Qwen/Qwen2.5-7B": 131072, "Qwen/Qwen2.5-7B-Instruct": 32768,
        "Qwen/Qwen2.5-7B-Instruct-1M": 1010000, "Qwen/Qwen2.5-Math-7B": 4096,
        "Qwen/Qwen2.5-Math-7B-Instruct": 4096, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 131072},
    "qwen2.5-14b": {"Qwen/Qwen2.5-14B": 131072, "Qwen/Qwen2.5-14B-Instruct": 32768,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 131072},
    "qwen2.5-32b": {"Qwen/Qwen2.5-32B": 131072, "Qwen/Qwen2.5-32B-Instruct": 32768,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 131072},
    "qwen2.5-72b": {"Qwen/Qwen2.5-72B": 131072, "Qwen/Qwen2.5-72B-Instruct": 32768},
    "r1-1.5b": {"deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 131072},
    "qwen3-0.6b": {"Qwen/Qwen3-0.6B": 40960},
    "qwen3-1.7b": {"Qwen/Qwen3-1.7B": 40960},
    "qwen3-4b": {"Qwen/Qwen3-4B": 40960, "Qwen/Qwen3-4B-Instruct-2507": 262144},
    "qwen3-8b": {"Qwen/Qwen3-8B": 40960, "Qwen/Qwen3-8B-Base": 32768},
    "qwen3-14b": {"Qwen/Qwen3-14B": 40960},
    "qwen3-32b": {"Qwen/Qwen3-32B": 40960},
    "qwen3-30b-a3b": {"Qwen/Qwen3-30B-A3B": 40960, "Qwen/Qwen3-30B-A3B-Instruct-2507": 262144},
    "qwen3-235b-a22b": {"Qwen/Qwen3-235B-A22B": 40960, "Qwen/Qwen3-235B-A22B-Instruct-2507": 262144},
    "llama-3.1-8b": {"meta-llama/Llama-3.1-8B": 131072, "meta-llama/Llama-3.1-8B-Instruct": 131072},
    "llama-3.1-70b": {"meta-llama/Llama-3.1-70B": 131072, "meta-llama/Llama-3.1-70B-Instruct": 131072,
        "meta-llama/Llama-3.3-70B-Instruct": 131072},
    "llama-3.2-1b": {"meta-llama/Llama-3.2-1B": 131072, "meta-llama/Llama-3.2-1B-Instruct": 131072},
    "llama-3.2-3b": {"meta-llama/Llama-3.2-3B": 131072, "meta-llama/Llama-3.2-3B-Instruct": 131072},
    "mistral-7b-v0.3": {"mistralai/Mistral-7B-Instruct-v0.3": 32768},
    "qwen2-vl-2b": {"Qwen/Qwen2-VL-2B": 32768, "Qwen/Qwen2-VL-2B-Instruct": 32768},
    "qwen2.5-vl-3b": {"Qwen/Qwen2.5-VL-3B-Instruct": 128000},
}  # fmt: skip


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE = {"llama-3.1-8b": 8.0, "llama-3.1-70b": 8.0, "llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0}
"""The factor of a Llama's rope."""


def _preset(name: str, size: str, max_position_embeddings: int) -> ModelSpec:
    kind, hidden, layers, heads, kv_heads, ffn, vocab, tied, head_dim = _SIZES[size]
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "head_dim": head_dim,
        "vision_config": _VISION.get(size),
        **(_EXPERTS if kind == "qwen3_moe" else {}),
        **({"rope_parameters": _LLAMA3_ROPE | {"factor": _ROPE[size]}} if kind == "llama" else {}),
    }
    return read_spec(config, name)


_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
"""2412.19437, section 4.2, without the head for multi-token prediction."""

_MOONLIGHT = _DEEPSEEK_V3 | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "intermediate_size": 11264,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
}
"""2502.16982, table 3, and the model's config.json."""


_GLM = {
    "model_type": "glm4_moe",
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 151552,
}
_GLM_4_5 = _GLM | {
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
    "first_k_dense_replace": 3,
    "intermediate_size": 12288,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
}
_GLM_4_5_AIR = _GLM | {
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "max_position_embeddings": 131072,
}
"""2508.06471, table 1, without the head for multi-token prediction."""
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
}
"""2508.10925, section 2."""
_QWEN3_5 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}


def _qwen3_5(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    tower = {"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    tower |= {"num_position_embeddings": 2304, "out_hidden_size": text["hidden_size"], **vision}
    kind = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    return {"model_type": kind, "text_config": _QWEN3_5 | text, "vision_config": tower}


_QWEN3_5_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
_QWEN3_5_9B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}
_QWEN3_5_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}
_QWEN3_5_35B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5_397B_A17B = {
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_WHOLE_CONFIGS = {
    "Qwen/Qwen3.5-9B": _qwen3_5(_QWEN3_5_9B, _QWEN3_5_VISION),
    "Qwen/Qwen3.5-27B": _qwen3_5(_QWEN3_5_27B, _QWEN3_5_VISION),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5(_QWEN3_5_35B_A3B, _QWEN3_5_VISION),
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5(_QWEN3_5_397B_A17B, _QWEN3_5_VISION),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3-0324": _DEEPSEEK_V3,
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
    "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT,
    "zai-org/GLM-4.5": _GLM_4_5 | {"max_position_embeddings": 131072},
    "zai-org/GLM-4.6": _GLM_4_5 | {"max_position_embeddings": 202752},
    "zai-org/GLM-4.7": _GLM_4_5 | {"max_position_embeddings": 202752},
    "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    "openai/gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}

PRESETS: dict[str, ModelSpec] = {
    **{name: _preset(name, size, length) for size, names in _NAMES.items() for name, length in names.items()},
    **{name: read_spec(config, name) for name, config in _WHOLE_CONFIGS.items()},
}
"""Name on the Hub -> what its config.json says of shapes."""


def shape_of(recipe: Recipe, config_file: Path | None = None, others: Iterable[Recipe] = ()) -> ModelSpec:
    """The shape of a recipe's model: a given config.json, a local folder, the table, or the warm start.

    Args:   others: recipes, one of whose runs may export the model that this one starts from.
    Raises: UserError: none of them knows it.
    """
    name, warm_start = recipe.policy.model_name, recipe.nemo_grpo.warm_start
    if config_file is None and name is None and warm_start is not None:
        config = {"model_type": "qwen2", "tie_word_embeddings": True, **warm_start.model_dump()}
        return read_spec(config, "warm start")
    assert name is not None
    local = config_file or Path(name) / "config.json"
    longest = recipe.policy.hf_config_overrides.get("max_position_embeddings")
    changed: dict[str, Any] = {"max_position_embeddings": longest} if isinstance(longest, int) else {}
    if config_file is not None or local.is_file():
        return replace(read_spec(read_config(local), name), **changed)
    if name not in PRESETS:
        for other in others:
            if other.run_dir != recipe.run_dir and Path(name).is_relative_to(other.run_dir / "hf"):
                return replace(shape_of(other), name=f"{name}, of {other.nemo_grpo.run_name}", **changed)
        is_folder = name.startswith((".", "/")) or name.count("/") != 1
        near = "" if is_folder else did_you_mean(name, PRESETS)
        raise UserError(
            f"policy.model_name={name}: neither a folder with a config.json nor in the planner's table"
            f"{near}; give --model-config FILE"
        )
    return replace(PRESETS[name], **changed)
