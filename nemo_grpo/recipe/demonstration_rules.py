"""Rules about recipes that train on demonstrations (``loss_fn.variant: sft``). See `registry`."""

from collections.abc import Iterator

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule


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
    variant, g = recipe.loss_fn.variant, recipe.grpo
    rollouts_only = {
        "async_grpo.enabled": g.is_async,
        "overlong_filtering": g.overlong_filtering,
        "reward_shaping.enabled": g.reward_shaping.enabled,
        "use_dynamic_sampling": g.use_dynamic_sampling,
    }
    for key, is_on in rollouts_only.items():
        if is_on and recipe.loss_fn.learns_from_demonstrations:
            yield f"grpo.{key}=true has no effect on {variant}, which samples nothing; set it to false"


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
