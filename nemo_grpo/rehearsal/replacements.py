"""Values that a rehearsal, or a run without a GPU, puts in place of a recipe's, each with its reason."""

from typing import Any, NamedTuple

from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM


class Replacement(NamedTuple):
    """Value in place of the recipe's.

    Attributes:
        value: replaces every other value except null, which means that the setting is off.
        reason: why the recipe's value cannot stay.
    """

    value: Any
    reason: str


CPU = {
    "policy.router_replay.enabled": Replacement(False, "vLLM returns no routing on a CPU"),
    "policy.quant_cfg": Replacement(None, "quantisation needs a GPU"),
    f"{GENERATION}.quant_cfg": Replacement(None, "quantisation needs a GPU"),
    f"{GENERATION}.backend": Replacement("vllm", "other samplers need a GPU"),
    f"{GENERATION}.refit_transport": Replacement(None, "other transports of the weights need a GPU"),
    f"{GENERATION}.real_quant": Replacement(False, "quantisation needs a GPU"),
    f"{VLLM}.kv_cache_dtype": Replacement("auto", "FP8 needs a GPU"),
    f"{VLLM}.is_mx": Replacement(False, "FP8 needs a GPU"),
    f"{VLLM}.use_deep_gemm": Replacement(False, "FP8 needs a GPU"),
    f"{VLLM}.precision": Replacement("bfloat16", "FP8 needs a GPU"),
    f"{VLLM}.tensor_parallel_size": Replacement(1, "an engine on a CPU is one process"),
    f"{VLLM}.pipeline_parallel_size": Replacement(1, "an engine on a CPU is one process"),
    f"{VLLM}.expert_parallel_size": Replacement(1, "an engine on a CPU is one process"),
    f"{MEGATRON}.fp8_cfg.enabled": Replacement(False, "FP8 needs Transformer Engine"),
    f"{MEGATRON}.model_overrides.first_last_layers_bf16": Replacement(False, "without FP8"),
    f"{MEGATRON}.moe_token_dispatcher_type": Replacement("alltoall", "other dispatchers need a GPU"),
    f"{MEGATRON}.moe_enable_deepep": Replacement(False, "DeepEP needs a GPU"),
    f"{MEGATRON}.moe_shared_expert_overlap": Replacement(False, "it overlaps CUDA streams"),
    f"{MEGATRON}.moe_grouped_gemm": Replacement(False, "grouped products need a GPU"),
    f"{MEGATRON}.gradient_accumulation_fusion": Replacement(False, "the fusion is a CUDA kernel"),
    f"{MEGATRON}.optimizer.optimizer_cpu_offload": Replacement(False, "there is no GPU to offload from"),
}
"""Key -> its value for NeMo-RL on a machine without a GPU."""

REHEARSAL = {
    "grpo.stop_at_validation_metric": Replacement(None, "three steps"),
    "grpo.stop_at_validation_threshold": Replacement(None, "three steps"),
    "checkpointing.enabled": Replacement(True, "a rehearsal stops and resumes"),
    "cluster.segment_size": Replacement(None, "one machine is one node, not a rack of them"),
    "policy.draft.enabled": Replacement(False, "one model is rehearsed"),
    f"{GENERATION}.vllm_kwargs.speculative_config": Replacement(None, "one model is rehearsed"),
    "data.use_multiple_dataloader": Replacement(False, "one data set stands for all"),
    "logger.wandb_enabled": Replacement(False, "no network"),
    "logger.mlflow_enabled": Replacement(False, "no network"),
    "logger.swanlab_enabled": Replacement(False, "no network"),
}
"""Key -> its value in a rehearsal, which has a small model and few steps, beside those of `CPU`."""

_TOKENS = "they are of the full model's tokenizer"
_LAYERS = "the small model has two layers"
_EXPERTS = "the small model has 4 experts"

OF_THE_FULL_MODEL = {
    f"{GENERATION}.stop_token_ids": Replacement(None, _TOKENS),
    f"{GENERATION}.bad_words": Replacement(None, _TOKENS),
    "policy.hf_config_overrides": Replacement({}, "they are of the full model"),
    "policy.refit_buffer_size_gb": Replacement(1, "it holds the full model's weights"),
    f"{MEGATRON}.num_layers_in_first_pipeline_stage": Replacement(None, _LAYERS),
    f"{MEGATRON}.num_layers_in_last_pipeline_stage": Replacement(None, _LAYERS),
    f"{MEGATRON}.mtp_num_layers": Replacement(0, "the small model has no such layers"),
    f"{MEGATRON}.expert_tensor_parallel_size": Replacement(1, _EXPERTS),
    f"{MEGATRON}.moe_router_num_groups": Replacement(None, _EXPERTS),
    f"{MEGATRON}.moe_router_group_topk": Replacement(None, _EXPERTS),
}
"""Key that belongs to the full model's size -> its value with the small one."""
