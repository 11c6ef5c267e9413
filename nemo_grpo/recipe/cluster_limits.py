"""Limits on recipes for NeMo-RL: settings that it refuses late, ignores, or gets wrong."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import (
    ABOVE_0,
    NOT_NULL,
    OF_EITHER,
    OFF,
    ON,
    UNSET,
    Limit,
    Refusal,
    Row,
    items_of,
    limits_on,
    one_of,
)


def _filter_spoils_the_difference(recipe: Recipe) -> str:
    return (
        "NeMo-RL then scores the policy within this filter and the reference without, and "
        f"{recipe.loss_fn.variant} needs their difference; use top_p=1.0 and top_k=null"
    )


ONLY_WITH_NEMO_GYM = (
    "only NeMo-Gym's rollouts mark such responses; set env.should_use_nemo_gym=true, or leave it out"
)

ROWS: tuple[Row, ...] = (
    Limit(
        "nemo_grpo.new_model",
        UNSET,
        "its model is made inside the embedded engine, and NeMo-RL loads a Hugging Face model; set it "
        "to null and name one in policy.model_name",
        Scope.CLUSTER,
    ),
    Limit(
        "checkpointing.keep_top_k",
        NOT_NULL,
        "NeMo-RL wants a number; for all, give as many as the run saves",
        Scope.CLUSTER,
    ),
    *limits_on(
        ("checkpointing.checkpoint_dir", "logger.log_dir"),
        NOT_NULL,
        "NeMo-RL needs a folder; name one that every node sees",
        Scope.CLUSTER,
    ),
    Limit(
        "checkpointing.metric_name",
        OF_EITHER,
        "it must start with val: or train:, or NeMo-RL stops at the first save; use val:accuracy",
        Scope.CLUSTER,
    ),
    Limit(
        "policy.dtensor_cfg.enabled",
        OFF,
        lambda recipe: (
            f"{recipe.loss_fn.variant} needs entropies, which only the Megatron workers return; train with "
            "policy.megatron_cfg.enabled=true"
        ),
        Scope.CLUSTER,
        when=conditions.loss_needs_entropy,
    ),
    Limit(
        "data_plane.enabled",
        OFF,
        lambda recipe: (
            f"{recipe.loss_fn.variant} needs the policy's entropies, and NeMo-RL's workers write only "
            "logprobs to the data plane; set it to false"
        ),
        Scope.CLUSTER,
        when=conditions.loss_needs_entropy,
    ),
    Limit(
        "grpo.adv_estimator.name",
        one_of(None, "grpo"),
        lambda recipe: (
            f"advantages come from loss_fn.variant={recipe.loss_fn.variant}, which ignores this; leave it out"
        ),
        Scope.CLUSTER,
        when=conditions.loss_is_a_variant,
    ),
    *limits_on(
        ("grpo.advantage_clip_high", "grpo.advantage_clip_low"),
        UNSET,
        lambda recipe: (
            f"it would clip advantages that {recipe.loss_fn.variant} has shaped, and distort its loss; set "
            "it to null"
        ),
        Scope.CLUSTER,
        when=conditions.variant_shapes_advantages,
    ),
    Limit(
        "loss_fn.reference_policy_kl_penalty",
        ABOVE_0,
        lambda recipe: (
            f"{recipe.loss_fn.variant} needs the reference policy, which NeMo-RL loads only for a penalty "
            "above 0; use the paper's, or 1e-9 for almost none"
        ),
        Scope.CLUSTER,
        when=conditions.loss_compares_with_the_reference,
    ),
    Limit(
        "policy.generation.top_p",
        one_of(1.0),
        _filter_spoils_the_difference,
        Scope.CLUSTER,
        when=conditions.loss_compares_with_the_reference,
    ),
    Limit(
        "policy.generation.top_k",
        UNSET,
        _filter_spoils_the_difference,
        Scope.CLUSTER,
        when=conditions.loss_compares_with_the_reference,
    ),
    Limit(
        "grpo.stop_at_validation_metric",
        UNSET,
        lambda recipe: (
            f"NeMo-RL's {recipe.loss_fn.variant} has no early stop and would train on; leave it and "
            "stop_at_validation_threshold out"
        ),
        Scope.CLUSTER,
        when=conditions.learns_from_demonstrations,
    ),
    Limit(
        "data_plane.enabled",
        OFF,
        lambda recipe: f"{recipe.loss_fn.variant} trains without rollouts; set it to false",
        Scope.CLUSTER,
        when=conditions.learns_from_demonstrations,
    ),
    Refusal(
        "nemo_grpo.task.name",
        lambda recipe: f"{recipe.loss_fn.variant} has no demonstrations with images; use a task of texts",
        Scope.CLUSTER,
        when=conditions.demonstrations_have_images,
    ),
    Limit(
        "grpo.reward_shaping.enabled",
        OFF,
        lambda recipe: (
            f"NeMo-RL measures only the first turn of a response, but one to {recipe.task.name} has "
            "several; set it to false"
        ),
        Scope.CLUSTER,
        when=conditions.penalises_length_of_several_turns,
    ),
    Limit(
        "nemo_grpo.task",
        UNSET,
        "it and env.should_use_nemo_gym would both make the rollouts; remove one",
        Scope.CLUSTER,
        when=conditions.uses_nemo_gym,
    ),
    Limit(
        "env.nemo_gym",
        NOT_NULL,
        "the configuration of NeMo-Gym's servers is missing; add it",
        Scope.CLUSTER,
        when=conditions.uses_nemo_gym,
    ),
    Limit(
        "env.nemo_gym.is_trajectory_collection",
        OFF,
        "it collects rollouts and trains nothing; use NeMo-RL's "
        "examples/nemo_gym/run_grpo_nemo_gym.py, or false",
        Scope.CLUSTER,
        when=conditions.uses_nemo_gym,
    ),
    Limit(
        "grpo.max_val_samples",
        UNSET,
        "NeMo-Gym validates on the whole data set; use null, and num_repeats of its data for several samples",
        Scope.CLUSTER,
        when=conditions.uses_nemo_gym,
    ),
    Limit(
        "policy.generation.top_k",
        UNSET,
        "NeMo-RL asks NeMo-Gym for none; use null",
        Scope.CLUSTER,
        when=conditions.uses_nemo_gym,
    ),
    *limits_on(
        ("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
        UNSET,
        ONLY_WITH_NEMO_GYM,
        Scope.CLUSTER,
        when=conditions.does_not_use_nemo_gym,
    ),
    *limits_on(
        (
            "reward_penalties.penalize_duplicated_reasoning",
            "reward_penalties.penalize_empty_final_answer",
            "reward_penalties.penalize_malformed_think_tag",
            "reward_penalties.penalize_unwanted_tokens",
        ),
        OFF,
        ONLY_WITH_NEMO_GYM,
        Scope.CLUSTER,
        when=conditions.does_not_use_nemo_gym,
    ),
    Limit(
        "data.use_multiple_dataloader",
        OFF,
        "nemo_grpo.task is a single data set; set it to false",
        Scope.CLUSTER,
        when=conditions.has_a_task,
    ),
    *limits_on(
        ("grpo.use_dynamic_sampling", "grpo.reward_shaping.enabled", "grpo.reward_scaling.enabled"),
        OFF,
        "grpo.async_grpo.enabled=true does not work with it; switch one of them off",
        Scope.CLUSTER,
        when=conditions.trains_asynchronously,
    ),
    Limit(
        "policy.generation.colocated.enabled",
        OFF,
        "grpo.async_grpo.enabled=true needs rollouts on separate GPUs; set it to false",
        Scope.CLUSTER,
        when=conditions.trains_asynchronously,
    ),
    Limit(
        "loss_fn.use_importance_sampling_correction",
        ON,
        "with grpo.async_grpo rollouts are older than the policy, and NeMo-RL refuses to train on "
        "them uncorrected; set it to true",
        Scope.CLUSTER,
        when=conditions.trains_asynchronously,
    ),
    Limit(
        "policy.generation.vllm_cfg.async_engine",
        ON,
        "grpo.async_grpo.enabled=true needs it; set it to true",
        Scope.CLUSTER,
        when=conditions.trains_asynchronously_with_vllm,
    ),
    Limit(
        "policy.generation.vllm_cfg.precision",
        one_of("fp8"),
        lambda recipe: (
            f"kv_cache_dtype={recipe.policy.generation.vllm_cfg.kv_cache_dtype} needs weights in FP8, too; "
            "set it to fp8, or kv_cache_dtype to auto"
        ),
        Scope.CLUSTER,
        when=conditions.vllm_caches_in_fp8,
    ),
    # The following rows apply where Megatron-core trains.
    Limit(
        "policy.precision",
        one_of("bfloat16"),
        "optimizer.bf16 and vLLM's precision are BF16 in NeMo-RL's base, and it refuses a mix; use bfloat16",
        Scope.MEGATRON,
    ),
    Limit(
        "policy.megatron_cfg.recompute_modules",
        items_of("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
        "NeMo-RL does not check the names and would recompute nothing; use some of core_attn, "
        "layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts",
        Scope.MEGATRON,
    ),
    Limit(
        "policy.megatron_cfg.optimizer.optimizer",
        one_of("adam"),
        "use_precision_aware_optimizer=true needs optimizer=adam; set one of them",
        Scope.MEGATRON,
        when=conditions.optimizer_is_precision_aware,
    ),
    Limit(
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction",
        ABOVE_0,
        "it must be above 0 to offload; use 1.0",
        Scope.MEGATRON,
        when=conditions.optimizer_is_offloaded,
    ),
    Limit(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        OFF,
        lambda recipe: f"{recipe.loss_fn.variant} needs entropies, which these leave out; set it to false",
        Scope.MEGATRON,
        when=conditions.loss_needs_entropy,
    ),
)
