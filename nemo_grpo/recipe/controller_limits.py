"""Limits on recipes for NeMo-RL's single controller (``async_rl``) and for its data plane."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import OF_TRAINING, OFF, ON, UNSET, Limit, Row, limits_on, one_of

ROWS: tuple[Row, ...] = (
    Limit(
        "data_plane.enabled",
        ON,
        "NeMo-RL's single controller (async_rl={..}) reads its data plane; set it to true",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Limit(
        "policy.megatron_cfg.enabled",
        ON,
        "only NeMo-RL's Megatron workers train in chunks, as async_rl does; set it to true",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Limit(
        "policy.generation.backend",
        one_of("vllm", "sglang"),
        "async_rl samples with neither of the others; use vllm or sglang",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Limit(
        "grpo.val_period",
        one_of(0, -1),
        "async_rl never validates; set it to 0",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    *limits_on(
        ("grpo.val_at_start", "grpo.val_at_end"),
        OFF,
        "async_rl never validates; set it to false",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Limit(
        "data.use_multiple_dataloader",
        OFF,
        "async_rl reads a single data loader; set it to false",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Limit(
        "policy.generation.vllm_cfg.async_engine",
        ON,
        "async_rl samples prompt by prompt; set it to true",
        Scope.CLUSTER,
        when=conditions.single_controller_samples_with_vllm,
    ),
    Limit(
        "checkpointing.metric_name",
        OF_TRAINING,
        "async_rl never validates; use null, or a metric of training, such as train:reward",
        Scope.CLUSTER,
        when=conditions.single_controller_saves,
    ),
    Limit(
        "grpo.seq_logprob_error_threshold",
        UNSET,
        lambda recipe: (
            "it leaves groups of different sizes, which loss_fn.aggregation=group_token_mean would weigh "
            "by chunks; set it to null, or async_rl.min_groups_for_streaming_train to "
            f"{recipe.grpo.num_prompts_per_step}"
        ),
        Scope.CLUSTER,
        when=conditions.streams_chunks_and_averages_whole_groups,
    ),
    Limit(
        "grpo.async_grpo.enabled",
        OFF,
        "NeMo-RL's asynchronous trainer does not read the data plane; set it or data_plane.enabled to false",
        Scope.CLUSTER,
        when=conditions.uses_data_plane,
    ),
    Limit(
        "data_plane.enabled",
        OFF,
        "force_on_policy_ratio=true leaves nothing by which loss_fn.weighting=random could draw for a "
        "response: neither its tokens nor its logprobs; set one of them to false",
        Scope.CLUSTER,
        when=conditions.random_weights_have_no_scores,
    ),
    Limit(
        "data_plane.enabled",
        OFF,
        lambda recipe: (
            f"it brings the loss advantages alone, and the weights of {recipe.loss_fn.variant} as set "
            f"(aggregation={recipe.loss_fn.aggregation}) reach beyond them, into a KL penalty or a clip; "
            "set it to false, or reference_policy_kl_penalty=0, or weight the clipped term from outside"
        ),
        Scope.CLUSTER,
        when=conditions.variant_has_weights_beyond_its_advantages,
    ),
    *limits_on(
        ("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
        UNSET,
        "NeMo-RL does not support it with a data plane; set it to null",
        Scope.CLUSTER,
        when=conditions.uses_data_plane_synchronously,
    ),
    *limits_on(
        ("grpo.advantage_clip_high", "grpo.advantage_clip_low"),
        UNSET,
        "with a data plane and group_token_mean it would clip advantages that carry the weights of "
        "their groups; set it to null, or data_plane.enabled to false",
        Scope.CLUSTER,
        when=conditions.uses_data_plane_synchronously_and_averages_whole_groups,
    ),
    Limit(
        "grpo.use_dynamic_sampling",
        OFF,
        lambda recipe: (
            f"with a data plane NeMo-RL selects groups by itself, and not as {recipe.loss_fn.variant} "
            "does; set it or data_plane.enabled to false"
        ),
        Scope.CLUSTER,
        when=conditions.data_plane_selects_groups_in_place_of_the_variant,
    ),
    Limit(
        "grpo.use_leave_one_out_baseline",
        one_of(False),
        "with a data plane and dynamic sampling NeMo-RL then drops the only correct response of a "
        "group, whose own std is 0; set it to false",
        Scope.CLUSTER,
        when=conditions.data_plane_selects_groups_as_the_variant,
    ),
    *limits_on(
        (
            "grpo.use_dynamic_sampling",
            "grpo.overlong_filtering",
            "grpo.reward_shaping.enabled",
            "grpo.reward_scaling.enabled",
        ),
        OFF,
        "NeMo-RL 7ea279abf does not read it with async_rl; set it to false, or leave async_rl out",
        Scope.CARE,
        when=conditions.has_single_controller,
    ),
    *limits_on(
        (
            "grpo.advantage_clip_high",
            "grpo.advantage_clip_low",
            "grpo.invalid_tool_call_advantage",
            "grpo.malformed_thinking_advantage",
        ),
        UNSET,
        "NeMo-RL 7ea279abf does not read it with async_rl; set it to null, or leave async_rl out",
        Scope.CARE,
        when=conditions.has_single_controller,
    ),
)
