"""Conditions under which the rows of the tables apply.

Each condition is a function of the recipe. Its name is its description: `nemo-grpo recipe rules` prints it.
"""

from nemo_grpo.recipe.recipe import Recipe


def makes_no_new_model(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.new_model is None


def makes_a_new_model(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.new_model is not None


def learns_from_rewards(recipe: Recipe) -> bool:
    return not recipe.loss_fn.learns_from_demonstrations


# Data and environments.


def has_a_task(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.task is not None


def trains_on_data_of_nemo_rl(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.task is None


def demonstrations_have_no_task(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.task is None and recipe.loss_fn.learns_from_demonstrations


def task_has_images(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.task is not None and recipe.nemo_grpo.task.needs_images


def demonstrations_have_images(recipe: Recipe) -> bool:
    return recipe.loss_fn.learns_from_demonstrations and task_has_images(recipe)


def uses_nemo_gym(recipe: Recipe) -> bool:
    return recipe.env.should_use_nemo_gym


def does_not_use_nemo_gym(recipe: Recipe) -> bool:
    return not recipe.env.should_use_nemo_gym


# Training.


def embedded_engine_trains(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.target == "embedded"


def megatron_trains(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.enabled


def megatron_does_not_train(recipe: Recipe) -> bool:
    return not recipe.policy.megatron_cfg.enabled


def tensor_parallel_size_is_1(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.tensor_model_parallel_size == 1


def ranks_hold_whole_replicas(recipe: Recipe) -> bool:
    return recipe.layout_fits


def packs_sequences(recipe: Recipe) -> bool:
    return recipe.policy.sequence_packing.enabled


def embedded_engine_packs_sequences(recipe: Recipe) -> bool:
    return embedded_engine_trains(recipe) and packs_sequences(recipe)


def cluster_packs_sequences(recipe: Recipe) -> bool:
    return recipe.nemo_grpo.target == "cluster" and packs_sequences(recipe)


def batches_by_sequences(recipe: Recipe) -> bool:
    return not recipe.policy.batches_by_tokens


def trains_in_fp8(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.fp8_in_use is not None


def trains_in_fp8_with_delayed_scaling(recipe: Recipe) -> bool:
    fp8 = recipe.policy.megatron_cfg.fp8_in_use
    return fp8 is not None and fp8.fp8_recipe == "delayed"


def trains_in_blockwise_fp8(recipe: Recipe) -> bool:
    fp8 = recipe.policy.megatron_cfg.fp8_in_use
    return fp8 is not None and fp8.fp8_recipe == "blockwise"


def trains_or_samples_in_fp8(recipe: Recipe) -> bool:
    return recipe.uses_fp8


def trains_lora(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.lora_in_use is not None


def recomputes_selected_modules(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.recompute_granularity == "selective"


def optimizer_is_precision_aware(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.optimizer.use_precision_aware_optimizer


def optimizer_is_offloaded(recipe: Recipe) -> bool:
    return recipe.policy.megatron_cfg.optimizer.optimizer_cpu_offload


def tokenizer_is_named(recipe: Recipe) -> bool:
    return bool(recipe.policy.tokenizer.name)


# The loss.


def kl_penalty(recipe: Recipe) -> float:
    """Return the factor of the KL penalty; 0 for a loss without one."""
    return getattr(recipe.loss_fn, "reference_policy_kl_penalty", 0.0)


def has_a_kl_penalty(recipe: Recipe) -> bool:
    return bool(kl_penalty(recipe))


def learns_from_demonstrations(recipe: Recipe) -> bool:
    return recipe.loss_fn.learns_from_demonstrations


def learns_from_rollouts(recipe: Recipe) -> bool:
    return not recipe.loss_fn.learns_from_demonstrations


def loss_is_a_variant(recipe: Recipe) -> bool:
    """True for a variant of this package or of the user, False for NeMo-RL's own loss."""
    return not recipe.loss_fn.is_stock


def loss_needs_entropy(recipe: Recipe) -> bool:
    return recipe.loss_fn.needs_entropy


def loss_compares_with_the_reference(recipe: Recipe) -> bool:
    return recipe.loss_fn.compares_with_reference


def ratio_is_forced_to_1(recipe: Recipe) -> bool:
    return recipe.loss_fn.force_on_policy_ratio


def averages_whole_groups(recipe: Recipe) -> bool:
    return recipe.loss_fn.aggregation == "group_token_mean"


def averages_whole_groups_in_several_updates(recipe: Recipe) -> bool:
    return averages_whole_groups(recipe) and recipe.num_updates_per_step != 1


def variant_shapes_advantages(recipe: Recipe) -> bool:
    return loss_is_a_variant(recipe) and recipe.loss_fn.shapes_advantages


def variant_has_weights_beyond_its_advantages(recipe: Recipe) -> bool:
    return loss_is_a_variant(recipe) and not recipe.loss_fn.folds


def random_weights_have_no_scores(recipe: Recipe) -> bool:
    draws_weights = getattr(recipe.loss_fn, "weighting", None) == "random"
    return draws_weights and not recipe.policy_is_scored


# Rollouts.


def shapes_rewards(recipe: Recipe) -> bool:
    return recipe.grpo.reward_shaping.enabled


def penalises_length(recipe: Recipe) -> bool:
    return recipe.grpo.reward_shaping.penalises_length


def penalises_length_of_several_turns(recipe: Recipe) -> bool:
    task = recipe.nemo_grpo.task
    return task is not None and bool(task.stop_texts) and penalises_length(recipe)


def samples_with_vllm(recipe: Recipe) -> bool:
    return recipe.samples_with_vllm


def vllm_caches_in_fp8(recipe: Recipe) -> bool:
    return recipe.samples_with_vllm and recipe.policy.generation.vllm_cfg.kv_cache_dtype != "auto"


def vllm_splits_experts(recipe: Recipe) -> bool:
    return recipe.samples_with_vllm and recipe.policy.generation.vllm_cfg.expert_parallel_size != 1


def trains_asynchronously(recipe: Recipe) -> bool:
    """True with grpo.async_grpo. NeMo-RL's other asynchronous trainer, async_rl, does not count here."""
    return recipe.grpo.is_async


def trains_asynchronously_with_vllm(recipe: Recipe) -> bool:
    return recipe.grpo.is_async and recipe.samples_with_vllm


# Validation and checkpoints.


def names_a_metric_to_stop_at(recipe: Recipe) -> bool:
    return bool(recipe.grpo.stop_at_validation_metric)


def names_no_metric_to_stop_at(recipe: Recipe) -> bool:
    return not recipe.grpo.stop_at_validation_metric


def validates_by_rollouts(recipe: Recipe) -> bool:
    return recipe.validates_by_rollouts


def validates_a_whole_batch(recipe: Recipe) -> bool:
    return recipe.validates_a_whole_batch


def ranks_checkpoints_by_validation(recipe: Recipe) -> bool:
    return recipe.checkpointing.ranks_by_validation and recipe.grpo.validates


def ranks_checkpoints_by_regular_validation(recipe: Recipe) -> bool:
    return recipe.checkpointing.ranks_by_validation and recipe.grpo.val_period != 0


# NeMo-RL's single controller and data plane.


def has_single_controller(recipe: Recipe) -> bool:
    return recipe.has_single_controller


def single_controller_samples_with_vllm(recipe: Recipe) -> bool:
    return recipe.has_single_controller and recipe.samples_with_vllm


def single_controller_saves(recipe: Recipe) -> bool:
    return recipe.has_single_controller and recipe.checkpointing.enabled


def single_controller_runs_ahead(recipe: Recipe) -> bool:
    return recipe.has_single_controller and recipe.rollouts_ahead > 0


def single_controller_waits_for_room(recipe: Recipe) -> bool:
    return recipe.async_rl is not None and recipe.async_rl.waits_for_room


def streams_chunks(recipe: Recipe) -> bool:
    return recipe.streams_chunks


def streams_chunks_and_averages_whole_groups(recipe: Recipe) -> bool:
    return recipe.streams_chunks and loss_is_a_variant(recipe) and averages_whole_groups(recipe)


def streams_chunks_and_variant_spans_groups(recipe: Recipe) -> bool:
    return recipe.streams_chunks and loss_is_a_variant(recipe) and recipe.loss_fn.spans_groups


def uses_data_plane(recipe: Recipe) -> bool:
    return recipe.uses_data_plane


def uses_data_plane_synchronously(recipe: Recipe) -> bool:
    return recipe.uses_data_plane and not recipe.has_single_controller


def uses_data_plane_synchronously_and_averages_whole_groups(recipe: Recipe) -> bool:
    return uses_data_plane_synchronously(recipe) and averages_whole_groups(recipe)


def _data_plane_selects_groups(recipe: Recipe) -> bool:
    # NeMo-RL's own loss expects the groups that NeMo-RL selects, so only a variant can be at odds with them.
    drops_groups = uses_data_plane_synchronously(recipe) and recipe.grpo.use_dynamic_sampling
    return drops_groups and loss_is_a_variant(recipe)


def data_plane_selects_groups_in_place_of_the_variant(recipe: Recipe) -> bool:
    return _data_plane_selects_groups(recipe) and bool(recipe.loss_fn.sampling_keys)


def data_plane_selects_groups_as_the_variant(recipe: Recipe) -> bool:
    return _data_plane_selects_groups(recipe) and not recipe.loss_fn.sampling_keys
