"""Numbers computed from a recipe, for the rows that compare them, with the names that messages use."""

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.rows import Number


def _width_unit(recipe: Recipe) -> int | None:
    new_model = recipe.nemo_grpo.new_model
    return None if new_model is None else new_model.width_unit


CHUNK_UNIT = Number("ranks x sequences of a microbatch", lambda recipe: recipe.chunk_unit)
MODEL_PARALLEL_SIZE = Number("TP x PP x CP", lambda recipe: recipe.model_parallel_size)
WIDTH_UNIT = Number("2 x num_attention_heads", _width_unit)
EXPERT_RANKS = Number(
    "policy.megatron_cfg.expert_model_parallel_size x expert_tensor_parallel_size",
    lambda recipe: recipe.num_expert_ranks,
)
GROUPS_AHEAD = Number("groups that rollouts may be ahead", lambda recipe: recipe.num_groups_ahead)
SEQUENCES_PER_MICROBATCH = Number(
    "data-parallel ranks x policy.train_micro_batch_size, or 1 with packing",
    lambda recipe: recipe.num_sequences_per_microbatch,
)
SEQUENCES_PER_RANK = Number(
    "sequences of a step on a data-parallel rank", lambda recipe: recipe.num_sequences_per_rank
)
SEQUENCES_PER_STEP = Number(
    "grpo.num_prompts_per_step x grpo.num_generations_per_prompt",
    lambda recipe: recipe.num_sequences_per_step,
)
STAGE_RANKS = Number("ranks of a pipeline stage", lambda recipe: recipe.num_stage_ranks)
SEQUENCE_MULTIPLE = Number(
    "2 CP, times TP with sequence_parallel", lambda recipe: recipe.policy.layout.sequence_multiple
)
WORLD_SIZE = Number(
    "cluster.gpus_per_node x cluster.num_nodes, less separate rollouts,", lambda recipe: recipe.world_size
)
