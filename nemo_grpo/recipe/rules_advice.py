"""Rules that only warn, and need arithmetic or a look-up; see `registry`."""

import math
import re
from collections.abc import Iterator

from nemo_grpo.recipe.keys import unread_key_messages
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.rules import changed_keys
from nemo_grpo.recipe.sections import MEGATRON, VLLM, metric_key

MOST_SHARED = 0.9
"""Largest share of a GPU's memory for vLLM that leaves enough for the policy on the same GPU."""
SHARES = re.compile(r"(?:accuracy|greedy|truncated|pass_k|pass@\d+|maj@\d+)(?:_stderr)?")
"""Names of the validation metrics that lie between 0 and 1."""


@rule(Scope.ADVICE)
def variant_uses_its_dynamic_sampling(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss_fn
    if loss.without_dynamic_sampling is not None and not recipe.grpo.use_dynamic_sampling:
        yield f"{loss.variant} without grpo.use_dynamic_sampling=true: {loss.without_dynamic_sampling}"


@rule(Scope.ADVICE)
def validation_can_reach_the_threshold(recipe: Recipe) -> Iterator[str]:
    goal = metric_key(recipe.grpo.stop_at_validation_metric)
    threshold = recipe.grpo.stop_at_validation_threshold
    # With NeMo-RL's own data accuracy is a mean reward, which may exceed 1.
    if goal is None or threshold is None or threshold <= 1 or recipe.nemo_grpo.task is None:
        return
    if SHARES.fullmatch(goal.rpartition("/")[2]):
        yield (
            f"grpo.stop_at_validation_threshold={threshold:g}: {goal} is at most 1, so that the run never "
            f"stops by it; use a share, as {threshold / 100:g} for {threshold:g} %"
        )


@rule(Scope.ADVICE)
def embedded_checkpoints_are_ranked(recipe: Recipe) -> Iterator[str]:
    checkpointing = recipe.checkpointing
    save_period = checkpointing.save_period
    val_period = recipe.grpo.val_period
    ranks_some = checkpointing.ranks_by_validation and checkpointing.keep_top_k is not None
    if recipe.nemo_grpo.target != "embedded" or not ranks_some or val_period <= 0:
        return
    if save_period % val_period != 0:
        next_multiple = math.ceil(save_period / val_period) * val_period
        yield (
            f"checkpointing.save_period={save_period} is no multiple of grpo.val_period={val_period}: a "
            f"checkpoint without {checkpointing.metric_name} cannot be the best, and only the newest "
            f"{checkpointing.keep_top_k} of them stay; use {next_multiple}"
        )


@rule(Scope.ADVICE)
def keys_are_read(recipe: Recipe) -> Iterator[str]:
    yield from unread_key_messages(recipe.to_dict())


@rule(Scope.ADVICE)
def clip_has_an_effect(recipe: Recipe) -> Iterator[str]:
    changed = changed_keys(recipe, "ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
    if changed and recipe.num_updates_per_step == 1:
        yield (
            f"loss_fn.{changed[0]}: with one update per step the ratio is 1 and no clip acts; "
            "policy.train_global_batch_size below prompts x generations makes several updates"
        )


@rule(Scope.ADVICE)
def learning_rate_suits_a_pretrained_model(recipe: Recipe) -> Iterator[str]:
    megatron = recipe.policy.megatron_cfg
    optimizer = megatron.optimizer
    # The limit is higher for LoRA, whose published recipes use ten times the rate, and for a new model, which
    # has no pretrained weights to lose.
    keeps_the_weights = megatron.lora_in_use is None and recipe.policy.model_name is not None
    largest = 1e-3 if keeps_the_weights else 1e-2
    # Adam's first step moves each weight by lr, whatever its gradient. Other optimizers multiply lr by it.
    if megatron.enabled and optimizer.optimizer == "adam" and optimizer.lr > largest:
        yield (
            f"{MEGATRON}.optimizer.lr={optimizer.lr:g} moves every weight by as much in its first step; "
            "published recipes have 1e-7 to 1e-5, 1e-4 with LoRA"
        )


@rule(Scope.ADVICE)
def shared_gpus_keep_room_for_training(recipe: Recipe) -> Iterator[str]:
    generation = recipe.policy.generation
    share = generation.vllm_cfg.gpu_memory_utilization
    shares = recipe.nemo_grpo.target == "cluster" and generation.colocated.enabled
    if shares and generation.backend == "vllm" and share > MOST_SHARED:
        yield (
            f"{VLLM}.gpu_memory_utilization={share} on GPUs that also train: what the policy keeps there "
            "during a rollout (contexts, buffers, weights at the refit) needs the rest; use 0.5 to 0.8"
        )
