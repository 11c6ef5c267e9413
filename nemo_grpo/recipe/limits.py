"""Limits on recipes for either engine, limits that are only advice, and limits for NeMo-RL 0.7.0."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import (
    EMPTY,
    NOT_NULL,
    OFF,
    ON,
    TWO_OR_MORE,
    UNSET,
    Limit,
    Refusal,
    Row,
    limits_on,
    one_of,
)


def _groups_would_differ_in_size(recipe: Recipe) -> str:
    return (
        "it leaves groups of different sizes, by which group_token_mean would weigh the updates of a step; "
        f"use policy.train_global_batch_size={recipe.num_sequences_per_step}, or "
        "loss_fn.aggregation=token_mean"
    )


UNKNOWN_TO_0_7_0 = (
    "NeMo-RL 0.7.0 does not know this and would run without; leave it out, or use a newer NeMo-RL"
)

ROWS: tuple[Row, ...] = (
    Limit(
        "policy.model_name",
        NOT_NULL,
        "no model; name a folder or a Hub model, or, to train a new one on demonstrations "
        "(loss_fn.variant=sft), give its sizes in nemo_grpo.new_model",
        Scope.ALL,
        when=conditions.makes_no_new_model,
    ),
    Limit(
        "policy.model_name",
        UNSET,
        "the run makes a model of nemo_grpo.new_model's sizes; set one of the two to null",
        Scope.ALL,
        when=conditions.makes_a_new_model,
    ),
    Limit(
        "nemo_grpo.new_model",
        UNSET,
        "a new model gives no response that a reward could tell apart; train it with loss_fn.variant=sft "
        "first, and name its export in policy.model_name",
        Scope.ALL,
        when=conditions.learns_from_rewards,
    ),
    Limit(
        "nemo_grpo.target",
        one_of("cluster"),
        "the embedded engine reads no data.train; set nemo_grpo.task, or target=cluster",
        Scope.ALL,
        when=conditions.trains_on_data_of_nemo_rl,
    ),
    Refusal(
        "loss_fn.variant",
        "it trains on the demonstrations of nemo_grpo.task; set one, or use NeMo-RL's own supervised recipes",
        Scope.ALL,
        when=conditions.demonstrations_have_no_task,
    ),
    *limits_on(
        ("grpo.max_val_samples", "grpo.val_batch_size"),
        NOT_NULL,
        "null leaves it to NeMo-Gym, which this recipe does not use; name a number",
        Scope.ALL,
        when=conditions.does_not_use_nemo_gym,
    ),
    Limit(
        "grpo.stop_at_validation_threshold",
        NOT_NULL,
        "the value of grpo.stop_at_validation_metric at which the run ends is missing; set both or neither",
        Scope.ALL,
        when=conditions.names_a_metric_to_stop_at,
    ),
    Limit(
        "grpo.stop_at_validation_threshold",
        UNSET,
        "the metric is missing; set grpo.stop_at_validation_metric, too, or neither",
        Scope.ALL,
        when=conditions.names_no_metric_to_stop_at,
    ),
    Limit(
        "policy.dtensor_cfg.enabled",
        OFF,
        "policy.megatron_cfg.enabled=true, and one of the two backends trains; set one to false",
        Scope.ALL,
        when=conditions.megatron_trains,
    ),
    Limit(
        "policy.dtensor_cfg.enabled",
        ON,
        "policy.megatron_cfg.enabled=false, and one of the two backends trains; set one to true",
        Scope.ALL,
        when=conditions.megatron_does_not_train,
    ),
    Limit(
        "policy.megatron_cfg.sequence_parallel",
        OFF,
        "it shards over the TP ranks, and tensor_model_parallel_size=1; set it to false or raise TP",
        Scope.ALL,
        when=conditions.tensor_parallel_size_is_1,
    ),
    Limit(
        "policy.precision",
        one_of("bfloat16"),
        "FP8 training keeps the rest in BF16; use bfloat16",
        Scope.ALL,
        when=conditions.trains_in_fp8,
    ),
    Limit(
        "policy.megatron_cfg.model_overrides.first_last_layers_bf16",
        OFF,
        "delayed scaling keeps one state for all layers; set it to false, or fp8_cfg.fp8_recipe to "
        "tensorwise or blockwise",
        Scope.ALL,
        when=conditions.trains_in_fp8_with_delayed_scaling,
    ),
    Limit(
        "policy.sequence_packing.algorithm",
        one_of(
            None,
            "concatenative",
            "first_fit_decreasing",
            "first_fit_shuffle",
            "modified_first_fit_decreasing",
        ),
        "it is none of NeMo-RL's; use first_fit_decreasing or modified_first_fit_decreasing",
        Scope.ALL,
        when=conditions.packs_sequences,
    ),
    Limit(
        "grpo.num_generations_per_prompt",
        one_of(1),
        lambda recipe: f"{recipe.loss_fn.variant} trains on one demonstration per prompt; use 1",
        Scope.ALL,
        when=conditions.learns_from_demonstrations,
    ),
    *limits_on(
        (
            "grpo.async_grpo.enabled",
            "grpo.overlong_filtering",
            "grpo.reward_shaping.enabled",
            "grpo.use_dynamic_sampling",
        ),
        OFF,
        lambda recipe: (
            f"it has no effect on {recipe.loss_fn.variant}, which samples nothing; set it to false"
        ),
        Scope.ALL,
        when=conditions.learns_from_demonstrations,
    ),
    Limit(
        "grpo.num_generations_per_prompt",
        TWO_OR_MORE,
        lambda recipe: f"a group of one has no advantage for {recipe.loss_fn.variant}; use 8",
        Scope.ALL,
        when=conditions.learns_from_rollouts,
    ),
    Limit(
        "grpo.overlong_filtering",
        OFF,
        _groups_would_differ_in_size,
        Scope.ALL,
        when=conditions.averages_whole_groups_in_several_updates,
    ),
    Limit(
        "grpo.seq_logprob_error_threshold",
        UNSET,
        _groups_would_differ_in_size,
        Scope.ALL,
        when=conditions.averages_whole_groups_in_several_updates,
    ),
    Limit(
        "grpo.skip_reference_policy_logprobs_calculation",
        OFF,
        lambda recipe: (
            f"loss_fn.reference_policy_kl_penalty={conditions.kl_penalty(recipe):g} needs these logprobs; "
            "set one to false or the other to 0"
        ),
        Scope.ALL,
        when=conditions.has_a_kl_penalty,
    ),
    *limits_on(
        ("policy.generation.stop_strings", "policy.generation.stop_token_ids"),
        EMPTY,
        "NeMo-RL drops it, as NeMo-Gym's requests carry none; leave it out",
        Scope.ADVICE,
        when=conditions.uses_nemo_gym,
    ),
    Limit(
        "loss_fn.use_importance_sampling_correction",
        ON,
        "with async_rl rollouts are older than the policy, and the loss takes them for its own; set "
        "it to true",
        Scope.ADVICE,
        when=conditions.single_controller_runs_ahead,
    ),
    Limit(
        "async_rl",
        UNSET,
        UNKNOWN_TO_0_7_0,
        Scope.V0_7_0,
    ),
    Limit(
        "policy.megatron_cfg.moe_aux_loss_coeff",
        one_of(None, 0.0),
        UNKNOWN_TO_0_7_0,
        Scope.V0_7_0,
    ),
)
