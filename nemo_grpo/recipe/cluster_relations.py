"""Relations that must hold between two settings of a recipe for NeMo-RL."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.derived import (
    CHUNK_UNIT,
    EXPERT_RANKS,
    GROUPS_AHEAD,
    SEQUENCE_MULTIPLE,
    SEQUENCES_PER_RANK,
    SEQUENCES_PER_STEP,
    STAGE_RANKS,
)
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import (
    DIVIDES,
    EQUALS,
    EXCLUDES,
    IS_AT_LEAST,
    IS_AT_MOST,
    IS_MULTIPLE_OF,
    NEEDS,
    Relation,
    Row,
)

VALIDATES_LIKE_TRAINING = (
    "NeMo-RL samples validation like training and refuses anything else; leave it out, and evaluate "
    "checkpoints with nemo-grpo eval"
)


def _sampler_waits(recipe: Recipe) -> str:
    assert recipe.async_rl is not None
    return f"async_rl.sampler.name={recipe.async_rl.sampler.name} waits for all of them; use at least that"


ROWS: tuple[Row, ...] = (
    Relation(
        "policy.logprob_batch_size",
        DIVIDES,
        SEQUENCES_PER_RANK,
        "NeMo-RL scores whole microbatches without packing; use a divisor, or "
        "policy.sequence_packing.enabled=true",
        Scope.CLUSTER,
        when=conditions.batches_by_sequences,
    ),
    Relation(
        "policy.dynamic_batching.enabled",
        EXCLUDES,
        "policy.sequence_packing.enabled",
        "keep packing, set the other to false",
        Scope.CLUSTER,
    ),
    Relation(
        "policy.dynamic_batching.enabled",
        EXCLUDES,
        "policy.megatron_cfg.pipeline_model_parallel_size",
        "use policy.sequence_packing.enabled=true instead",
        Scope.CLUSTER,
    ),
    Relation("grpo.batch_multiplier", NEEDS, "grpo.use_dynamic_sampling", "set it, or use 1", Scope.CLUSTER),
    Relation(
        "grpo.max_rollout_turns",
        IS_AT_LEAST,
        "nemo_grpo.task.num_turns",
        lambda recipe: (
            f"a response to {recipe.task.name} takes up to {recipe.task.num_turns} turns, and would end "
            f"before its answer; use {recipe.task.num_turns}"
        ),
        Scope.CLUSTER,
    ),
    Relation(
        "policy.generation.val_temperature",
        EQUALS,
        "policy.generation.temperature",
        VALIDATES_LIKE_TRAINING,
        Scope.CLUSTER,
        when=conditions.does_not_use_nemo_gym,
    ),
    Relation(
        "policy.generation.val_top_p",
        EQUALS,
        "policy.generation.top_p",
        VALIDATES_LIKE_TRAINING,
        Scope.CLUSTER,
        when=conditions.does_not_use_nemo_gym,
    ),
    Relation(
        "policy.generation.val_top_k",
        EQUALS,
        "policy.generation.top_k",
        VALIDATES_LIKE_TRAINING,
        Scope.CLUSTER,
        when=conditions.does_not_use_nemo_gym,
    ),
    Relation(
        "grpo.val_batch_size",
        IS_AT_MOST,
        "grpo.max_val_samples",
        "NeMo-RL validates whole batches only, and fails where there is none; make them equal",
        Scope.CLUSTER,
        when=conditions.validates_by_rollouts,
    ),
    Relation(
        "policy.generation.vllm_cfg.pipeline_parallel_size",
        NEEDS,
        "policy.generation.vllm_cfg.async_engine",
        "set it, or use 1",
        Scope.CLUSTER,
        when=conditions.samples_with_vllm,
    ),
    Relation(
        "policy.generation.vllm_cfg.max_model_len",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        "a longer sequence ends the run; make them equal",
        Scope.CLUSTER,
        when=conditions.samples_with_vllm,
    ),
    Relation(
        "policy.generation.vllm_cfg.expert_parallel_size",
        IS_MULTIPLE_OF,
        "policy.generation.vllm_cfg.tensor_parallel_size",
        "use a multiple, or 1",
        Scope.CLUSTER,
        when=conditions.vllm_splits_experts,
    ),
    Relation(
        "async_rl.min_groups_for_streaming_train",
        IS_AT_MOST,
        "grpo.num_prompts_per_step",
        "a step has no more groups; use at most that",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Relation(
        "policy.train_global_batch_size",
        EQUALS,
        SEQUENCES_PER_STEP,
        "with async_rl a step is one update; use all its responses",
        Scope.CLUSTER,
        when=conditions.has_single_controller,
    ),
    Relation(
        "async_rl.max_buffered_rollouts",
        IS_AT_LEAST,
        GROUPS_AHEAD,
        _sampler_waits,
        Scope.CLUSTER,
        when=conditions.single_controller_waits_for_room,
    ),
    Relation(
        "async_rl.min_groups_for_streaming_train",
        IS_AT_LEAST,
        "grpo.num_prompts_per_step",
        lambda recipe: (
            f"{recipe.loss_fn.variant} as set decides a response's advantages by other groups, too; make "
            "them equal, for one chunk a step"
        ),
        Scope.CLUSTER,
        when=conditions.streams_chunks_and_variant_spans_groups,
    ),
    Relation(
        "grpo.num_generations_per_prompt",
        IS_MULTIPLE_OF,
        CHUNK_UNIT,
        lambda recipe: (
            "a chunk of groups is split evenly over ranks and microbatches; use one, or set "
            f"async_rl.min_groups_for_streaming_train to {recipe.grpo.num_prompts_per_step}"
        ),
        Scope.CLUSTER,
        when=conditions.streams_chunks,
    ),
    Relation(
        "policy.megatron_cfg.context_parallel_size",
        NEEDS,
        "policy.sequence_packing.enabled",
        "Megatron splits packed sequences only; set it to true",
        Scope.MEGATRON,
    ),
    Relation(EXPERT_RANKS, DIVIDES, STAGE_RANKS, "use divisors", Scope.MEGATRON),
    Relation(
        "policy.logprob_chunk_size",
        NEEDS,
        "policy.megatron_cfg.defer_fp32_logits",
        "whole logits in FP32 would undo the chunks; set it to true",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer",
        NEEDS,
        "policy.megatron_cfg.optimizer.use_distributed_optimizer",
        "set one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload",
        NEEDS,
        "policy.megatron_cfg.optimizer.use_distributed_optimizer",
        "set one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        EXCLUDES,
        "policy.sequence_packing.enabled",
        "change one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        EXCLUDES,
        "policy.megatron_cfg.context_parallel_size",
        "change one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        EXCLUDES,
        "policy.generation.top_k",
        "change one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        EXCLUDES,
        "policy.generation.top_p",
        "change one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "policy.megatron_cfg.use_fused_linear_logprobs",
        EXCLUDES,
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather",
        "change one of them",
        Scope.MEGATRON,
    ),
    Relation(
        "checkpointing.save_period",
        IS_MULTIPLE_OF,
        "grpo.val_period",
        lambda recipe: (
            f"a checkpoint without {recipe.checkpointing.metric_name} ranks last and is deleted; make it "
            "one, or set checkpointing.metric_name to null or train:reward"
        ),
        Scope.CARE,
        when=conditions.ranks_checkpoints_by_regular_validation,
    ),
    Relation(
        "policy.make_sequence_length_divisible_by",
        IS_MULTIPLE_OF,
        SEQUENCE_MULTIPLE,
        "a sequence cannot be split otherwise; use that",
        Scope.CLUSTER,
    ),
    Relation(
        "grpo.val_batch_size",
        DIVIDES,
        "grpo.max_val_samples",
        "NeMo-RL validates whole batches only, and leaves the rest out; make them equal",
        Scope.CARE,
        when=conditions.validates_a_whole_batch,
    ),
    Relation(
        "grpo.reward_shaping.max_response_length",
        IS_AT_LEAST,
        "policy.generation.max_new_tokens",
        "NeMo-RL's penalty exceeds overlong_buffer_penalty between them; make them equal",
        Scope.CARE,
        when=conditions.penalises_length,
    ),
)
