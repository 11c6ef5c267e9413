"""Values that the embedded engine supports, for the keys of NeMo-RL's config that also have other values."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import (
    ABSENT,
    EMPTY,
    EQUALS,
    OF_VALIDATION,
    OFF,
    ON,
    UNSET,
    Allowed,
    Condition,
    Limit,
    Refusal,
    Relation,
    Row,
    always,
    items_of,
    one_of,
)

NOT_SUPPORTED = "not supported by the embedded engine"
CLUSTER_ONLY = "remove it; only the cluster engine supports it"


def _supported(key: str, allowed: Allowed, remedy: str = CLUSTER_ONLY, when: Condition = always) -> Limit:
    """Make a row for a key whose other values the embedded engine does not support."""
    return Limit(key, allowed, f"{NOT_SUPPORTED}; {remedy}", Scope.EMBEDDED, when)


ROWS: tuple[Row, ...] = (
    # For every key of this first part null means off in NeMo-RL, too, so a recipe may contain it.
    _supported("data.use_multiple_dataloader", OFF),
    _supported("env.should_use_nemo_gym", OFF),
    _supported("grpo.async_grpo.enabled", OFF),
    _supported("grpo.reward_scaling.enabled", OFF),
    _supported("logger.swanlab_enabled", OFF),
    _supported("policy.draft.enabled", OFF),
    _supported("policy.dtensor_cfg.enabled", OFF),
    _supported("policy.dynamic_batching.enabled", OFF),
    _supported("policy.megatron_cfg.optimizer.optimizer_cpu_offload", OFF),
    _supported("policy.megatron_cfg.optimizer.use_precision_aware_optimizer", OFF),
    _supported("async_rl", UNSET),
    _supported("checkpointing.checkpoint_must_save_by", UNSET),
    _supported("checkpointing.ft_save_period", UNSET),
    _supported("data.max_input_seq_length", UNSET),
    _supported("grpo.adv_estimator", UNSET),
    _supported("grpo.advantage_clip_high", UNSET),
    _supported("grpo.advantage_clip_low", UNSET),
    _supported("grpo.invalid_tool_call_advantage", UNSET),
    _supported("grpo.malformed_thinking_advantage", UNSET),
    _supported("grpo.reward_shaping.stop_properly_penalty_coef", UNSET),
    _supported("grpo.seq_logprob_error_threshold", UNSET),
    _supported("policy.generation.quant_cfg", UNSET),
    _supported("policy.quant_cfg", UNSET),
    _supported("policy.hf_config_overrides", ABSENT),
    _supported("policy.pretrained_checkpoint", ABSENT),
    _supported("policy.tokenizer.chat_template_kwargs", ABSENT),
    _supported("policy.megatron_cfg.env_vars", ABSENT),
    _supported("reward_penalties", ABSENT),
    _supported("grpo.batch_multiplier", one_of(None, 1)),
    _supported("grpo.max_num_epochs", one_of(None, 1)),
    _supported("grpo.val_start_at", one_of(None, -1)),
    _supported("policy.generation.bad_words", EMPTY),
    _supported("policy.megatron_cfg.mtp_num_layers", one_of(None, 0)),
    _supported("policy.tokenizer.chat_template", one_of(None, "default")),
    # The remedy for the following keys is another value.
    _supported("checkpointing.save_optimizer", ON, "use true"),
    _supported("nemo_grpo.engine.generator", one_of("auto", "decoder", "hf"), "use auto"),
    _supported("policy.generation.stop_strings", EMPTY, "use stop_token_ids"),
    _supported(
        "policy.generation.top_k",
        UNSET,
        "rollouts are scored over all tokens; use null, and val_top_k to filter validation",
    ),
    _supported(
        "policy.generation.top_p",
        one_of(1.0),
        "rollouts are scored over all tokens; use 1.0, and val_top_p to filter validation",
    ),
    _supported("policy.precision", one_of("auto", "float32", "bfloat16"), "use auto, float32 or bfloat16"),
    _supported("policy.megatron_cfg.expert_model_parallel_size", one_of(1), "use 1"),
    _supported("policy.megatron_cfg.optimizer.optimizer", one_of("adam"), "use adam"),
    _supported(
        "policy.megatron_cfg.recompute_modules", items_of("core_attn", "mlp"), "use core_attn and mlp"
    ),
    Limit(
        "checkpointing.metric_name",
        OF_VALIDATION,
        "the embedded engine ranks checkpoints by validation metrics only; use val:accuracy, or null",
        Scope.EMBEDDED,
    ),
    Refusal(
        "nemo_grpo.task.name",
        "its images need the cluster engine (NeMo-RL), whose processor encodes them; set "
        "nemo_grpo.target=cluster",
        Scope.EMBEDDED,
        when=conditions.task_has_images,
    ),
    _supported(
        "policy.megatron_cfg.fp8_cfg.fp8_param",
        OFF,
        "use false; parameters stay in BF16",
        when=conditions.trains_in_fp8,
    ),
    _supported(
        "policy.megatron_cfg.fp8_cfg.fp8_recipe",
        one_of("blockwise", "delayed", "tensorwise"),
        "use blockwise, delayed or tensorwise",
        when=conditions.trains_in_fp8,
    ),
    _supported("policy.megatron_cfg.peft.dropout", one_of(0.0), "use 0", when=conditions.trains_lora),
    _supported(
        "policy.megatron_cfg.peft.lora_A_init_method",
        one_of("xavier"),
        "use xavier",
        when=conditions.trains_lora,
    ),
    _supported(
        "policy.megatron_cfg.peft.lora_B_init_method", one_of("zero"), "use zero", when=conditions.trains_lora
    ),
    _supported(
        "policy.megatron_cfg.peft.lora_dtype",
        # NeMo-RL's base has the string None.
        one_of(None, "None"),
        "use null, which is policy.precision",
        when=conditions.trains_lora,
    ),
    _supported(
        "policy.sequence_packing.algorithm",
        one_of(None, "first_fit_decreasing"),
        "use first_fit_decreasing",
        when=conditions.packs_sequences,
    ),
    _supported("policy.sequence_packing.fuse_loss", OFF, "remove it", when=conditions.packs_sequences),
    Limit(
        "policy.megatron_cfg.activation_checkpointing",
        ON,
        "policy.megatron_cfg.recompute_granularity=selective acts only with it; set it to true",
        Scope.EMBEDDED,
        when=conditions.recomputes_selected_modules,
    ),
    Relation(
        "policy.megatron_cfg.scheduler.end_weight_decay",
        EQUALS,
        "policy.megatron_cfg.optimizer.weight_decay",
        f"{NOT_SUPPORTED}; make them equal",
        Scope.EMBEDDED,
    ),
    Relation(
        "policy.megatron_cfg.scheduler.start_weight_decay",
        EQUALS,
        "policy.megatron_cfg.optimizer.weight_decay",
        f"{NOT_SUPPORTED}; make them equal",
        Scope.EMBEDDED,
    ),
    Relation(
        "policy.tokenizer.name",
        EQUALS,
        "policy.model_name",
        f"{NOT_SUPPORTED}; use policy.model_name's own",
        Scope.EMBEDDED,
        when=conditions.tokenizer_is_named,
    ),
)
