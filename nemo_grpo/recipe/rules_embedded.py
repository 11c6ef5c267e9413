"""Rules on recipes for the embedded engine that need arithmetic or a look-up; see `registry`."""

from collections.abc import Iterator

from nemo_grpo.recipe.megatron_sections import LORA_LAYERS, ModelOverrides
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.rules import PEFT
from nemo_grpo.recipe.sections import MEGATRON
from nemo_grpo.support.errors import as_yaml, did_you_mean


@rule(Scope.EMBEDDED)
def turns_are_limited_by_the_task(recipe: Recipe) -> Iterator[str]:
    """Refuse a maximum of turns below the task's, but not 1, the default, which the user did not choose."""
    turns = recipe.grpo.max_rollout_turns
    task = recipe.nemo_grpo.task
    if task is not None and 1 < turns < task.num_turns:
        yield (
            f"grpo.max_rollout_turns={turns}: in the embedded engine a response to {task.name} takes up to "
            f"{task.num_turns} turns all the same; leave it out, and set the task's own limit"
        )


@rule(Scope.EMBEDDED)
def lora_adapts_layers_of_the_decoder(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return
    for name in (*peft.target_modules, *peft.exclude_modules):
        if name not in LORA_LAYERS:
            yield f"{PEFT}: the embedded engine cannot adapt {name!r}; use {', '.join(LORA_LAYERS)}"
    if not peft.layers:
        yield f"{PEFT}.exclude_modules={peft.exclude_modules} leaves no layer to adapt; shorten it"


@rule(Scope.EMBEDDED)
def model_overrides_are_supported(recipe: Recipe) -> Iterator[str]:
    overrides = recipe.policy.megatron_cfg.model_overrides or ModelOverrides()
    for name, value in (overrides.model_extra or {}).items():
        yield (
            f"{MEGATRON}.model_overrides.{name}={as_yaml(value)} is not supported by the embedded engine"
            f"{did_you_mean(name, ModelOverrides.model_fields)}"
        )


@rule(Scope.EMBEDDED)
def updates_hold_whole_groups(recipe: Recipe) -> Iterator[str]:
    if not recipe.loss_fn.needs_whole_groups:
        return
    batch = recipe.policy.train_global_batch_size
    group_size = recipe.grpo.num_generations_per_prompt
    if batch % group_size or batch // group_size < recipe.data_parallel_size:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true sums over whole groups: "
            f"policy.train_global_batch_size={batch} must be a multiple of "
            f"grpo.num_generations_per_prompt={group_size}, with at least one group for each of the "
            f"{recipe.data_parallel_size} data-parallel ranks; use {recipe.num_sequences_per_step}"
        )
