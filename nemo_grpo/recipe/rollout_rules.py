"""Rules about NeMo-RL's rollouts: what samples, where, how long, how often. See `cluster_rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_grpo.recipe.cluster_rules import GENERATION, VLLM, uses_fp8, value_of

if TYPE_CHECKING:
    from nemo_grpo.recipe.recipe import Recipe

MULTI_TURN_TASKS = frozenset(("search_qa",))
"""Tasks whose environment answers within an episode."""

VAL_BATCH_SIZE = 256
"""Of NeMo-RL's base configurations."""


def validation_samples_as_training(recipe: Recipe) -> Iterator[str]:
    g = recipe.policy.generation
    for key, value, other in (
        ("val_temperature", g.val_temperature, g.temperature),
        ("val_top_p", g.val_top_p, g.top_p),
        ("val_top_k", value_of(recipe, f"{GENERATION}.val_top_k", g.top_k), g.top_k),
    ):
        if value != other:
            yield (
                f"{GENERATION}.{key}={value} differs from {key.removeprefix('val_')}={other}: NeMo-RL "
                "samples validation as it samples training and refuses anything else; leave it out, and "
                "evaluate checkpoints with nemo-grpo eval"
            )


def progress_compares_like_with_like(recipe: Recipe) -> Iterator[str]:
    g = recipe.policy.generation
    if recipe.loss_fn.variant == "erpo" and (g.top_p < 1 or g.top_k is not None):
        yield (
            f"{GENERATION}.top_p={g.top_p}, top_k={g.top_k or 'null'}: NeMo-RL then scores the policy within "
            "this filter and the reference without, and ERPO's progress is their difference; use 1.0 and null"
        )


def validation_batches_are_whole(recipe: Recipe) -> Iterator[str]:
    g, batch = recipe.grpo, value_of(recipe, "grpo.val_batch_size", VAL_BATCH_SIZE)
    if (g.val_period or g.val_at_start or g.val_at_end) and (batch < 1 or g.max_val_samples % batch):
        yield (
            f"grpo.val_batch_size={batch} does not divide grpo.max_val_samples={g.max_val_samples}: NeMo-RL "
            "validates whole batches only, and with none reports an accuracy of 0; make them equal"
        )


def fp8_cache_has_fp8_weights(recipe: Recipe) -> Iterator[str]:
    cache, precision = value_of(recipe, f"{VLLM}.kv_cache_dtype"), value_of(recipe, f"{VLLM}.precision")
    if str(cache).startswith("fp8") and precision != "fp8":
        yield (
            f"{VLLM}.kv_cache_dtype={cache} needs {VLLM}.precision=fp8, not {precision}; set it, or use auto"
        )


def fp8_rollouts_are_corrected(recipe: Recipe) -> Iterator[str]:
    if uses_fp8(recipe) and not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            "loss_fn.use_importance_sampling_correction=false: FP8 rounds differently in rollouts and in "
            "training, which the correction makes up for; set it to true, or start from base/cluster-fp8.yaml"
        )


def rollout_engines_fit_the_ranks(recipe: Recipe) -> Iterator[str]:
    tp, pp, ep = (value_of(recipe, f"{VLLM}.{k}_parallel_size", 1) for k in ("tensor", "pipeline", "expert"))
    world, per_node = recipe.num_rollout_gpus or recipe.world_size, recipe.cluster.gpus_per_node
    if world % (tp * pp) or ((tp * pp) % per_node and per_node % (tp * pp)):
        yield (
            f"{VLLM}.tensor_parallel_size={tp} x pipeline_parallel_size={pp} does not tile the {world} GPUs "
            f"in nodes of {per_node}; use a divisor of {per_node}"
        )
    if pp > 1 and not value_of(recipe, f"{VLLM}.async_engine"):
        yield f"{VLLM}.pipeline_parallel_size={pp} needs {VLLM}.async_engine=true; set it, or use 1"
    if ep > 1 and ep % tp:
        yield f"{VLLM}.expert_parallel_size={ep} must be a multiple of tensor_parallel_size={tp}; use {tp}"


def separate_rollouts_have_gpus(recipe: Recipe) -> Iterator[str]:
    if value_of(recipe, f"{GENERATION}.colocated.enabled", True):
        return
    key, c = f"{GENERATION}.colocated.resources", recipe.cluster
    gpus, nodes = value_of(recipe, f"{key}.gpus_per_node", 0), value_of(recipe, f"{key}.num_nodes", 0)
    if c.num_nodes == 1 and (not 0 < gpus < c.gpus_per_node or nodes > 1):
        yield (
            f"{key}.gpus_per_node={gpus}: rollouts apart (colocated.enabled=false) take some of the node's "
            f"{c.gpus_per_node} GPUs and leave at least one to train; use fewer, and num_nodes=1"
        )
    if c.num_nodes > 1 and (not 0 < nodes < c.num_nodes or gpus != c.gpus_per_node):
        yield (
            f"{key}.num_nodes={nodes}, gpus_per_node={gpus}: rollouts apart (colocated.enabled=false) take "
            f"whole nodes of the {c.num_nodes}; use 1 to {c.num_nodes - 1}, and "
            f"gpus_per_node={c.gpus_per_node}"
        )


def rollouts_have_room(recipe: Recipe) -> Iterator[str]:
    length = recipe.policy.max_total_sequence_length
    longest, share = (
        value_of(recipe, f"{VLLM}.max_model_len"),
        value_of(recipe, f"{VLLM}.gpu_memory_utilization"),
    )
    if longest is not None and longest < length:
        yield (
            f"{VLLM}.max_model_len={longest} is less than policy.max_total_sequence_length={length}; make "
            "them equal"
        )
    if share is not None and not 0 < share < 1:
        yield f"{VLLM}.gpu_memory_utilization={share} must be above 0 and below 1; 0.6 is NeMo-RL's"


def async_steps_are_allowed(recipe: Recipe) -> Iterator[str]:
    if not value_of(recipe, "grpo.async_grpo.enabled"):
        return
    key = "grpo.async_grpo.enabled=true"
    if recipe.grpo.use_dynamic_sampling:
        yield f"{key} does not work with grpo.use_dynamic_sampling=true; give up one of them"
    if recipe.grpo.reward_shaping.enabled:
        yield f"{key} does not work with grpo.reward_shaping.enabled=true; give up one of them"
    if not value_of(recipe, f"{VLLM}.async_engine"):
        yield f"{key} needs {VLLM}.async_engine=true; set it"
    if value_of(recipe, f"{GENERATION}.colocated.enabled", True):
        yield f"{key} needs rollouts on GPUs of their own; set {GENERATION}.colocated.enabled=false"


def async_steps_are_corrected(recipe: Recipe) -> Iterator[str]:
    if value_of(recipe, "grpo.async_grpo.enabled") and not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            "grpo.async_grpo.enabled=true: rollouts are older than the policy, and NeMo-RL refuses to train "
            "on them uncorrected; set loss_fn.use_importance_sampling_correction=true"
        )


def surplus_prompts_are_sampled_dynamically(recipe: Recipe) -> Iterator[str]:
    factor = value_of(recipe, "grpo.batch_multiplier", 1)
    if factor != 1 and not recipe.grpo.use_dynamic_sampling:
        yield f"grpo.batch_multiplier={factor} needs grpo.use_dynamic_sampling=true; set it, or use 1"


def training_has_an_epoch(recipe: Recipe) -> Iterator[str]:
    epochs = value_of(recipe, "grpo.max_num_epochs", 1)
    if epochs < 1:
        yield (
            f"grpo.max_num_epochs={epochs}: NeMo-RL would return before the first step; a task's data last "
            "for grpo.max_num_steps in one epoch, use 1 or more"
        )


def episodes_have_turns(recipe: Recipe) -> Iterator[str]:
    turns, task = value_of(recipe, "grpo.max_rollout_turns", 1), recipe.nemo_grpo.task.name
    if task in MULTI_TURN_TASKS and turns < 2:
        yield (
            f"grpo.max_rollout_turns={turns}: an episode of {task} ends before the first tool result; use 2 "
            "or more"
        )


def length_penalty_sees_the_whole_response(recipe: Recipe) -> Iterator[str]:
    task, shaping = recipe.nemo_grpo.task.name, recipe.grpo.reward_shaping
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and task in MULTI_TURN_TASKS:
        yield (
            "grpo.reward_shaping.enabled=true: NeMo-RL measures the first turn of a response, and an episode "
            f"of {task} has several; set it to false"
        )


def turns_end_where_vllm_sees_it(recipe: Recipe) -> Iterator[str]:
    stops, task = recipe.policy.generation.stop_strings, recipe.nemo_grpo.task.name
    if task in MULTI_TURN_TASKS and value_of(recipe, f"{VLLM}.skip_tokenizer_init", not stops):
        yield (
            f"{GENERATION}.stop_strings={stops or 'null'}: NeMo-RL starts vLLM without a tokenizer, which "
            f"then cannot see where a turn of {task} ends; set it to [</search>, </answer>], and leave "
            f"{VLLM}.skip_tokenizer_init out"
        )


RULES = (
    validation_samples_as_training,
    progress_compares_like_with_like,
    validation_batches_are_whole,
    fp8_cache_has_fp8_weights,
    fp8_rollouts_are_corrected,
    rollout_engines_fit_the_ranks,
    separate_rollouts_have_gpus,
    rollouts_have_room,
    async_steps_are_allowed,
    async_steps_are_corrected,
    surplus_prompts_are_sampled_dynamically,
    training_has_an_epoch,
    episodes_have_turns,
    length_penalty_sees_the_whole_response,
    turns_end_where_vllm_sees_it,
)
"""Every rule of this file."""
