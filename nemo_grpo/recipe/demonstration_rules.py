"""Rules about recipes that train on demonstrations (``loss_fn.variant: sft``). See `registry`."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_grpo.dotted import value_of
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule

ROLLOUTS_ONLY = (
    "grpo.async_grpo.enabled",
    "grpo.overlong_filtering",
    "grpo.reward_shaping.enabled",
    "grpo.use_dynamic_sampling",
)
"""Settings of rollouts that have an effect where they are true."""


@rule(Scope.ALL)
def groups_fit_the_objective(recipe: Recipe) -> Iterator[str]:
    number, variant = recipe.grpo.num_generations_per_prompt, recipe.loss_fn.variant
    key = f"grpo.num_generations_per_prompt={number}"
    if recipe.loss_fn.learns_from_demonstrations:
        if number != 1:
            yield f"{key}: {variant} trains on one demonstration per prompt; use 1"
    elif number < 2:
        yield f"{key} must be at least 2: a group of one has no advantage for {variant}; use 8"


@rule(Scope.ALL)
def demonstrations_need_no_rollout_settings(recipe: Recipe) -> Iterator[str]:
    variant = recipe.loss_fn.variant
    for key in ROLLOUTS_ONLY if recipe.loss_fn.learns_from_demonstrations else ():
        if value_of(recipe, key):
            yield f"{key}=true has no effect on {variant}, which samples nothing; set it to false"


@rule(Scope.ALL)
def demonstrations_make_one_update_per_step(recipe: Recipe) -> Iterator[str]:
    batch, prompts = recipe.policy.train_global_batch_size, recipe.grpo.num_prompts_per_step
    if recipe.loss_fn.learns_from_demonstrations and batch != prompts:
        yield (
            f"policy.train_global_batch_size={batch}: a step of {recipe.loss_fn.variant} is one update on "
            f"grpo.num_prompts_per_step={prompts} demonstrations; make them equal"
        )


@rule(Scope.CLUSTER)
def demonstrations_are_texts(recipe: Recipe) -> Iterator[str]:
    task = recipe.nemo_grpo.task
    if recipe.loss_fn.learns_from_demonstrations and task is not None and task.needs_images:
        yield (
            f"nemo_grpo.task.name={task.name}: {recipe.loss_fn.variant} has no demonstrations with images; "
            "use a task of texts"
        )


@rule(Scope.CLUSTER)
def demonstrations_train_to_the_last_step(recipe: Recipe) -> Iterator[str]:
    metric = recipe.grpo.stop_at_validation_metric
    if recipe.loss_fn.learns_from_demonstrations and metric is not None:
        yield (
            f"grpo.stop_at_validation_metric={metric}: NeMo-RL's {recipe.loss_fn.variant} has no early stop "
            "and would train on; leave it and stop_at_validation_threshold out"
        )
