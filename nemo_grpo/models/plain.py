"""Families whose tensors are Llama's, or differ from them as their declarations say."""

from nemo_grpo.models.declaration import Declaration

LLAMA = Declaration("LlamaForCausalLM", "llama")
"""Llama 3, 3.1, 3.2 (text) and 3.3. Rope scaling is no weight: it stays in the config on both sides."""
MISTRAL = Declaration("MistralForCausalLM", "mistral")
"""Dense models."""
QWEN2 = Declaration("Qwen2ForCausalLM", "qwen2", has_qkv_bias=True)
"""Qwen2, Qwen2.5, Qwen2.5-Math and DeepSeek-R1-Distill-Qwen: biases on queries, keys and values."""
QWEN3 = Declaration("Qwen3ForCausalLM", "qwen3", has_qk_norm=True)
"""Dense models: norms on each head's queries and keys, no biases."""
QWEN3_MOE = Declaration("Qwen3MoeForCausalLM", "qwen3_moe", has_qk_norm=True, is_computed=False)
"""Every layer routes to gated experts."""
