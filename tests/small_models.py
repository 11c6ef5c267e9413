"""Configurations of tiny models, a family each; a test changes only the sizes that it is about."""

import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
VISION = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip
MARKS = {"vision_start_token_id": 90, "vision_end_token_id": 91, "image_token_id": 92, "video_token_id": 93}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def _qwen2_5_vl(**text):
    tied = text["tie_word_embeddings"]
    return transformers.Qwen2_5_VLConfig(
        text_config=text | SPECIAL, vision_config=VISION, tie_word_embeddings=tied, **MARKS
    )


GEMMA = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, **SPECIAL}
LATENT = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 20, "qk_nope_head_dim": 12, "v_head_dim": 12, "qk_rope_head_dim": 4,
    "num_nextn_predict_layers": 0, **SPECIAL,
}  # fmt: skip
GLM = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "moe_intermediate_size": 16, "head_dim": 16,
    "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0, **SPECIAL,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": 16,
    "sliding_window": 6, "max_position_embeddings": 131072, **SPECIAL,
}  # fmt: skip
QWEN3_5 = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, **SPECIAL,
}  # fmt: skip
SHARED = {**EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "qwen2.5-vl": (_qwen2_5_vl, {"rope_parameters": MROPE}),
    "gemma3": (transformers.Gemma3TextConfig, {**GEMMA, "tie_word_embeddings": True}),
    "deepseek-v3": (transformers.DeepseekV3Config, {**LATENT, "rope_parameters": YARN}),
    "moonlight": (transformers.DeepseekV3Config, {**LATENT, "q_lora_rank": None, "n_group": 1}),
    "glm-4.5": (transformers.Glm4MoeConfig, GLM),
    "glm-4.5-air": (transformers.Glm4MoeConfig, {**GLM, "use_qk_norm": False, "n_group": 1}),
    "gpt-oss": (transformers.GptOssConfig, GPT_OSS),
    "qwen3.5": (transformers.Qwen3_5TextConfig, QWEN3_5),
    "qwen3.5-tied": (transformers.Qwen3_5TextConfig, {**QWEN3_5, "tie_word_embeddings": True}),
    "qwen3.5-moe": (transformers.Qwen3_5MoeTextConfig, QWEN3_5 | SHARED),
    "qwen2.5-vl-tied": (_qwen2_5_vl, {"rope_parameters": MROPE, "tie_word_embeddings": True}),
}
_CONVERTED_ALONE = (
    *("qwen3-moe", "qwen2.5-vl", "gemma3", "deepseek-v3", "moonlight", "glm", "gpt-oss", "qwen3.5"),
)
TRAINED = tuple(family for family in FAMILIES if not family.startswith(_CONVERTED_ALONE))
"""Those that the embedded engine trains."""


def small_config(family="qwen2-tied", **changes):
    """The configuration of a family's tiny model."""
    make, own = FAMILIES[family]
    return make(**SIZES | own | changes)


def auto_class(config):
    """transformers' class that makes and loads the model of a configuration."""
    has_vision = "vision_config" in config.sub_configs
    return transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
