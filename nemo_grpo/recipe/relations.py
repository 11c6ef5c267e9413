"""Relations between two settings that hold for either engine, and relations that hold for NeMo-RL 0.7.0."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.derived import (
    MODEL_PARALLEL_SIZE,
    SEQUENCE_MULTIPLE,
    SEQUENCES_PER_MICROBATCH,
    SEQUENCES_PER_STEP,
    WIDTH_UNIT,
    WORLD_SIZE,
)
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import EQUALS, IS_AT_LEAST, IS_AT_MOST, IS_BELOW, IS_MULTIPLE_OF, Relation, Row

VALIDATES_AS_IT_TRAINS = (
    "NeMo-RL 0.7.0 validates as it trains and would run without; leave it out, or use a newer NeMo-RL"
)
LONGER_SEQUENCE = "a longer sequence than this ends the run; raise it"
NO_ROOM_FOR_THE_PROMPT = "it leaves no room for the prompt; lower one or raise the other"

ROWS: tuple[Row, ...] = (
    Relation(
        "nemo_grpo.new_model.hidden_size",
        IS_MULTIPLE_OF,
        WIDTH_UNIT,
        "the rotary embedding turns pairs; use a multiple",
        Scope.ALL,
    ),
    Relation(
        "nemo_grpo.new_model.num_attention_heads",
        IS_MULTIPLE_OF,
        "nemo_grpo.new_model.num_key_value_heads",
        "change one of them",
        Scope.ALL,
    ),
    Relation(
        "policy.megatron_cfg.optimizer.min_lr",
        IS_AT_MOST,
        "policy.megatron_cfg.optimizer.lr",
        "lower it",
        Scope.ALL,
    ),
    Relation(
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        IS_BELOW,
        "policy.megatron_cfg.scheduler.lr_decay_iters",
        "it counts from the first update; change one of them",
        Scope.ALL,
    ),
    Relation(
        "policy.max_total_sequence_length",
        IS_MULTIPLE_OF,
        SEQUENCE_MULTIPLE,
        "round it, or change the layout",
        Scope.ALL,
    ),
    Relation(
        "nemo_grpo.new_model.num_key_value_heads",
        IS_MULTIPLE_OF,
        "policy.megatron_cfg.tensor_model_parallel_size",
        "change one of them",
        Scope.ALL,
    ),
    Relation(
        "nemo_grpo.new_model.num_hidden_layers",
        IS_MULTIPLE_OF,
        "policy.megatron_cfg.pipeline_model_parallel_size",
        "change one of them",
        Scope.ALL,
    ),
    Relation(
        "nemo_grpo.new_model.max_position_embeddings",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        "no sequence may be longer; raise it",
        Scope.ALL,
    ),
    Relation(
        "policy.generation.max_new_tokens",
        IS_AT_MOST,
        "policy.max_total_sequence_length",
        NO_ROOM_FOR_THE_PROMPT,
        Scope.ALL,
    ),
    Relation(
        WORLD_SIZE,
        IS_MULTIPLE_OF,
        MODEL_PARALLEL_SIZE,
        "use a multiple, or smaller sizes in policy.megatron_cfg",
        Scope.ALL,
    ),
    Relation(
        "grpo.reward_shaping.overlong_buffer_length",
        IS_BELOW,
        "grpo.reward_shaping.max_response_length",
        "every response would be penalised; lower it",
        Scope.ALL,
        when=conditions.shapes_rewards,
    ),
    Relation(
        "policy.generation.max_new_tokens",
        IS_BELOW,
        "policy.max_total_sequence_length",
        NO_ROOM_FOR_THE_PROMPT,
        Scope.ALL,
        when=conditions.embedded_engine_trains,
    ),
    Relation(
        "policy.sequence_packing.train_mb_tokens",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        LONGER_SEQUENCE,
        Scope.ALL,
        when=conditions.embedded_engine_packs_sequences,
    ),
    Relation(
        "policy.sequence_packing.logprob_mb_tokens",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        LONGER_SEQUENCE,
        Scope.ALL,
        when=conditions.embedded_engine_packs_sequences,
    ),
    Relation(
        "policy.train_global_batch_size",
        IS_MULTIPLE_OF,
        "grpo.num_generations_per_prompt",
        "loss_fn.aggregation=group_token_mean averages whole groups; use a multiple, or token_mean",
        Scope.ALL,
        when=conditions.averages_whole_groups,
    ),
    Relation(
        "policy.train_global_batch_size",
        IS_MULTIPLE_OF,
        SEQUENCES_PER_MICROBATCH,
        "change one of them",
        Scope.ALL,
        when=conditions.ranks_hold_whole_replicas,
    ),
    Relation(
        "policy.train_global_batch_size",
        EQUALS,
        SEQUENCES_PER_STEP,
        "with loss_fn.force_on_policy_ratio=true the ratio is 1 in the first of several updates only; "
        "make them equal, or set that to false",
        Scope.ALL,
        when=conditions.ratio_is_forced_to_1,
    ),
    Relation(
        "policy.train_global_batch_size",
        EQUALS,
        "grpo.num_prompts_per_step",
        lambda recipe: (
            f"a step of {recipe.loss_fn.variant} is one update on all its demonstrations; make them equal"
        ),
        Scope.ALL,
        when=conditions.learns_from_demonstrations,
    ),
    Relation(
        "policy.sequence_packing.train_mb_tokens",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        LONGER_SEQUENCE,
        Scope.ADVICE,
        when=conditions.cluster_packs_sequences,
    ),
    Relation(
        "policy.sequence_packing.logprob_mb_tokens",
        IS_AT_LEAST,
        "policy.max_total_sequence_length",
        LONGER_SEQUENCE,
        Scope.ADVICE,
        when=conditions.cluster_packs_sequences,
    ),
    Relation(
        "policy.generation.val_temperature",
        EQUALS,
        "policy.generation.temperature",
        VALIDATES_AS_IT_TRAINS,
        Scope.V0_7_0,
    ),
    Relation(
        "policy.generation.val_top_p",
        EQUALS,
        "policy.generation.top_p",
        VALIDATES_AS_IT_TRAINS,
        Scope.V0_7_0,
    ),
    Relation(
        "policy.generation.val_top_k",
        EQUALS,
        "policy.generation.top_k",
        VALIDATES_AS_IT_TRAINS,
        Scope.V0_7_0,
    ),
)
