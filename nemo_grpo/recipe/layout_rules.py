"""Rules about sizes: what must divide what, and what fits into what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_grpo.recipe.recipe import Recipe


def megatron_is_on(recipe: Recipe) -> Iterator[str]:
    if not recipe.policy.megatron_cfg.enabled:
        yield "policy.megatron_cfg.enabled=false: both engines train with Megatron-core; set it to true"


def step_splits_into_updates(recipe: Recipe) -> Iterator[str]:
    g, batch = recipe.grpo, recipe.policy.train_global_batch_size
    if recipe.num_sequences_per_step % batch:
        fitting = _divisors_near(
            recipe.num_sequences_per_step, batch, multiple_of=_microbatch_sequences(recipe)
        )
        yield (
            f"policy.train_global_batch_size={batch} does not divide grpo.num_prompts_per_step x "
            f"grpo.num_generations_per_prompt = {g.num_prompts_per_step} x {g.num_generations_per_prompt} = "
            f"{recipe.num_sequences_per_step}; use {fitting}"
        )


def layout_fits_the_ranks(recipe: Recipe) -> Iterator[str]:
    m, world, size = recipe.policy.megatron_cfg, recipe.world_size, recipe.model_parallel_size
    if world % size:
        yield (
            f"cluster.gpus_per_node x cluster.num_nodes = {world} is not a multiple of TP x PP x CP = "
            f"{m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size} x {m.context_parallel_size} "
            f"= {size}; use a multiple of {size} ranks, or smaller sizes in policy.megatron_cfg"
        )
    elif (world // m.pipeline_model_parallel_size) % m.expert_model_parallel_size:
        yield (
            f"policy.megatron_cfg.expert_model_parallel_size={m.expert_model_parallel_size} does not divide "
            f"the {world // m.pipeline_model_parallel_size} ranks of a pipeline stage; use a divisor"
        )


def update_splits_into_microbatches(recipe: Recipe) -> Iterator[str]:
    p, dp = recipe.policy, recipe.data_parallel_size
    if p.train_global_batch_size % _microbatch_sequences(recipe):
        yield (
            f"policy.train_global_batch_size={p.train_global_batch_size} is not a multiple of "
            f"policy.train_micro_batch_size x data-parallel ranks = {p.train_micro_batch_size} x {dp}; "
            "change one of them"
        )


def prompt_has_room(recipe: Recipe) -> Iterator[str]:
    p = recipe.policy
    if p.generation.max_new_tokens >= p.max_total_sequence_length:
        yield (
            f"policy.generation.max_new_tokens={p.generation.max_new_tokens} leaves no room for the prompt "
            f"in policy.max_total_sequence_length={p.max_total_sequence_length}; lower one or raise the other"
        )


def sequence_parallel_has_ranks(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        yield (
            "policy.megatron_cfg.sequence_parallel=true shards over the TP ranks, but "
            "tensor_model_parallel_size=1; set it to false or raise TP"
        )


def sequence_splits_over_ranks(recipe: Recipe) -> Iterator[str]:
    m, length = recipe.policy.megatron_cfg, recipe.policy.max_total_sequence_length
    tensor = m.tensor_model_parallel_size if m.sequence_parallel else 1
    context = 2 * m.context_parallel_size if m.context_parallel_size > 1 else 1
    if length % (tensor * context):
        yield (
            f"policy.max_total_sequence_length={length} is not a multiple of {tensor * context} (TP with "
            "sequence_parallel, times 2 CP), so the longest sequence cannot be split; round it"
        )


def scoring_matches_training_at_high_tp(recipe: Recipe) -> Iterator[str]:
    p = recipe.policy
    if p.megatron_cfg.tensor_model_parallel_size >= 4 and p.train_micro_batch_size != p.logprob_batch_size:
        yield (
            f"policy.logprob_batch_size={p.logprob_batch_size} differs from "
            f"train_micro_batch_size={p.train_micro_batch_size}: with TP >= 4 the two then round differently "
            "and NeMo-RL refuses to start; make them equal"
        )


def bins_hold_the_longest_sequence(recipe: Recipe) -> Iterator[str]:
    p = recipe.policy
    for key, tokens in (("train_mb_tokens", p.train_mb_tokens), ("logprob_mb_tokens", p.logprob_mb_tokens)):
        if tokens is not None and tokens < p.max_total_sequence_length:
            yield (
                f"policy.sequence_packing.{key}={tokens} is less than policy.max_total_sequence_length="
                f"{p.max_total_sequence_length}: the longest sequence fits no bin; raise it"
            )


def fp8_preconditions(recipe: Recipe) -> Iterator[str]:
    p = recipe.policy
    if p.megatron_cfg.fp8_cfg is None or not p.megatron_cfg.fp8_cfg.enabled:
        return
    if p.precision != "bfloat16":
        yield f"policy.precision={p.precision}: FP8 training keeps the rest in BF16; use bfloat16"
    if p.megatron_cfg.optimizer.use_precision_aware_optimizer:
        yield (
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true does not work with fp8_cfg; "
            "set it to false"
        )


def fp8_recipe_can_leave_layers_out(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    if m.fp8_cfg is None or not m.fp8_cfg.enabled or m.fp8_cfg.fp8_recipe != "delayed":
        return
    if m.model_overrides is not None and m.model_overrides.first_last_layers_bf16:
        yield (
            "policy.megatron_cfg.model_overrides.first_last_layers_bf16=true: delayed scaling keeps one "
            "state for all layers; set it to false, or fp8_cfg.fp8_recipe to tensorwise or blockwise"
        )


def warm_start_model_is_consistent(recipe: Recipe) -> Iterator[str]:
    w, m = recipe.nemo_grpo.warm_start, recipe.policy.megatron_cfg
    if w is None:
        return
    length = recipe.policy.max_total_sequence_length
    rules = (
        ("num_attention_heads", w.num_attention_heads, "hidden_size", w.hidden_size),
        ("num_key_value_heads", w.num_key_value_heads, "num_attention_heads", w.num_attention_heads),
        ("TP", m.tensor_model_parallel_size, "num_key_value_heads", w.num_key_value_heads),
        ("PP", m.pipeline_model_parallel_size, "num_hidden_layers", w.num_hidden_layers),
    )
    for divisor, d, dividend, n in rules:
        if n % d:
            yield f"nemo_grpo.warm_start.{dividend}={n} is not a multiple of {divisor}={d}; change one"
    if length > w.max_position_embeddings:
        yield (
            f"nemo_grpo.warm_start.max_position_embeddings={w.max_position_embeddings} is less than "
            f"policy.max_total_sequence_length={length}; raise it"
        )


def _microbatch_sequences(recipe: Recipe) -> int:
    """Sequences in one microbatch of every data-parallel rank; 1 where the ranks do not fit the layout."""
    if recipe.world_size % recipe.model_parallel_size:
        return 1
    return recipe.policy.train_micro_batch_size * recipe.data_parallel_size


def _divisors_near(number: int, wanted: int, *, multiple_of: int) -> str:
    """The divisors next to ``wanted``, below and above, that are multiples; all count where none is."""
    unit = multiple_of if number % multiple_of == 0 else 1
    divisors = [d for d in range(unit, number + 1, unit) if number % d == 0]
    near = {*[d for d in divisors if d <= wanted][-1:], *[d for d in divisors if d >= wanted][:1]}
    return " or ".join(map(str, sorted(near)))


RULES = (
    megatron_is_on,
    step_splits_into_updates,
    layout_fits_the_ranks,
    update_splits_into_microbatches,
    prompt_has_room,
    sequence_parallel_has_ranks,
    sequence_splits_over_ranks,
    scoring_matches_training_at_high_tp,
    bins_hold_the_longest_sequence,
    fp8_preconditions,
    fp8_recipe_can_leave_layers_out,
    warm_start_model_is_consistent,
)
"""Every rule of this file."""
