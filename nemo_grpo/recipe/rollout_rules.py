"""Rules about NeMo-RL's rollouts: sampler, GPUs, lengths, draws. See `cluster_rules`."""

from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.host import has_images
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import GENERATION, VLLM, AsyncGRPO, AsyncRL
from nemo_grpo.support.errors import UserError, as_yaml
from nemo_grpo.tasks.base import check_num_validation
from nemo_grpo.tasks.jsonl import VALIDATION_FILES, FileTaskConfig, listed_problems


def samples_with_vllm(recipe: Recipe) -> bool:
    """True if vllm_cfg has an effect; NeMo-RL's other samplers read a section of their own."""
    return recipe.policy.generation.backend == "vllm"


def uses_fp8(recipe: Recipe) -> bool:
    """True if the policy trains in FP8 or samples in it."""
    return bool(recipe.policy.megatron_cfg.fp8_in_use) or (
        samples_with_vllm(recipe) and recipe.policy.generation.vllm_cfg.precision == "fp8"
    )


@rule(Scope.CLUSTER)
def validation_samples_like_training(recipe: Recipe) -> Iterator[str]:
    g = recipe.policy.generation
    if recipe.env.should_use_nemo_gym:  # the one place where it may differ
        return
    for key, value, other in (
        ("val_temperature", g.val_temperature, g.temperature),
        ("val_top_p", g.val_top_p, g.top_p),
        ("val_top_k", g.val_top_k, g.top_k),
    ):
        if value != other:
            yield (
                f"{GENERATION}.{key}={value} differs from {key.removeprefix('val_')}={other}: NeMo-RL "
                "samples validation like training and refuses anything else; leave it out, and "
                "evaluate checkpoints with nemo-grpo eval"
            )


@rule(Scope.CLUSTER)
def reference_and_policy_are_scored_alike(recipe: Recipe) -> Iterator[str]:
    g = recipe.policy.generation
    if recipe.loss_fn.compares_with_reference and (g.top_p < 1 or g.top_k is not None):
        yield (
            f"{GENERATION}.top_p={g.top_p}, top_k={g.top_k or 'null'}: NeMo-RL then scores the policy within "
            f"this filter and the reference without, and {recipe.loss_fn.variant} needs their difference; "
            "use 1.0 and null"
        )


@rule(Scope.CLUSTER)
def nemo_gym_takes_data_as_it_is(recipe: Recipe) -> Iterator[str]:
    """examples/nemo_gym/run_grpo_nemo_gym.py refuses, drops (`setup_nemo_gym_config`) or does otherwise."""
    if not recipe.env.should_use_nemo_gym:
        return
    gym, generation = "env.should_use_nemo_gym=true", recipe.policy.generation
    if recipe.nemo_grpo.task is not None:
        yield f"{gym} beside nemo_grpo.task: both would make the rollouts; remove one"
    if recipe.env.nemo_gym is None:
        yield f"{gym}: env.nemo_gym, the configuration of its servers, is missing; add it"
    elif recipe.env.nemo_gym.is_trajectory_collection:
        yield (
            "env.nemo_gym.is_trajectory_collection=true collects rollouts and trains nothing; use NeMo-RL's "
            "examples/nemo_gym/run_grpo_nemo_gym.py, or false"
        )
    if recipe.grpo.max_val_samples is not None:
        yield (
            f"grpo.max_val_samples={recipe.grpo.max_val_samples}: NeMo-Gym validates on the whole data set; "
            "use null, and num_repeats of its data for several samples"
        )
    if generation.top_k is not None:
        yield f"{GENERATION}.top_k={generation.top_k}: NeMo-RL asks NeMo-Gym for none; use null"


@rule(Scope.CLUSTER)
def penalties_of_nemo_gym_need_its_rollouts(recipe: Recipe) -> Iterator[str]:
    """No other rollout marks such responses: NeMo-RL refuses at its setup, or after the first rollout."""
    advantages = ("invalid_tool_call_advantage", "malformed_thinking_advantage")
    penalties = {f"grpo.{key}": getattr(recipe.grpo, key) for key in advantages}
    penalties |= {f"reward_penalties.{key}": on for key, on in recipe.reward_penalties.items() if on is True}
    for key, value in penalties.items():
        if value is not None and not recipe.env.should_use_nemo_gym:
            yield f"{key}={as_yaml(value)} needs env.should_use_nemo_gym=true; set it, or leave the key out"


@rule(Scope.CLUSTER)
def data_are_one_set(recipe: Recipe) -> Iterator[str]:
    if not recipe.data.use_multiple_dataloader:
        return
    if recipe.nemo_grpo.task is not None:
        yield "data.use_multiple_dataloader=true: nemo_grpo.task is a single data set; set it to false"
    if recipe.has_single_controller:
        yield "data.use_multiple_dataloader=true: async_rl reads a single data loader; set it to false"


@rule(Scope.ADVICE)
def nemo_gym_asks_for_no_stops(recipe: Recipe) -> Iterator[str]:
    for key in ("stop_strings", "stop_token_ids") if recipe.env.should_use_nemo_gym else ():
        if value := getattr(recipe.policy.generation, key):
            yield f"{GENERATION}.{key}={value}: NeMo-RL drops it, as NeMo-Gym's requests carry none"


@rule(Scope.ADVICE)
def images_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """vllm_worker.py: engines on the policy's GPUs forget images in their sleep, engines apart never do."""
    generation = recipe.policy.generation
    vllm = generation.vllm_cfg
    keeps = not (vllm.async_engine and vllm.reset_encoder_cache_after_weight_update)
    if samples_with_vllm(recipe) and not generation.colocated.enabled and keeps and has_images(recipe):
        yield (
            f"{GENERATION}.colocated.enabled=false: after a refit vLLM sees an image as the old weights "
            f"did; set {VLLM}.async_engine and {VLLM}.reset_encoder_cache_after_weight_update (newer than "
            "NeMo-RL 0.7.0), or let no image return within a few steps"
        )


@rule(Scope.ADVICE)
def prefixes_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's other trainers reset the cache, or let the engine sleep, between rollouts."""
    trainer: AsyncGRPO | AsyncRL | None = recipe.grpo.async_grpo if recipe.grpo.is_async else recipe.async_rl
    name = "grpo.async_grpo" if recipe.grpo.is_async else "async_rl"
    cache = recipe.policy.generation.vllm_cfg.enable_prefix_caching
    if trainer is None or not samples_with_vllm(recipe) or cache is False:
        return
    if not trainer.recompute_kv_cache_after_weight_updates:
        yield (
            f"{name}.recompute_kv_cache_after_weight_updates=false: after a refit vLLM goes on from what "
            f"older weights cached of a prompt ({VLLM}.enable_prefix_caching={as_yaml(cache)}; null: on from "
            "Ampere on); set it to true, or the cache to false"
        )
    elif isinstance(trainer, AsyncGRPO) and not trainer.in_flight_weight_updates:
        yield (
            f"{name}.recompute_kv_cache_after_weight_updates=true: NeMo-RL 0.7.0 reads it only with "
            f"{name}.in_flight_weight_updates=true; set that, or {VLLM}.enable_prefix_caching=false"
        )


@rule(Scope.ALL)
def number_of_validation_problems_is_set(recipe: Recipe) -> Iterator[str]:
    """Null is for NeMo-Gym (algorithms/grpo.py, `GRPOConfig`); else NeMo-RL divides by it."""
    if recipe.env.should_use_nemo_gym:
        return
    for key in ("max_val_samples", "val_batch_size"):
        if getattr(recipe.grpo, key) is None:
            yield f"grpo.{key}=null leaves it to NeMo-Gym, which this recipe does not use; name a number"


@rule(Scope.CLUSTER)
def validation_files_hold_the_validation_problems(recipe: Recipe) -> Iterator[str]:
    grpo, task = recipe.grpo, recipe.nemo_grpo.task
    if not isinstance(task, FileTaskConfig) or not grpo.validates or not task.validation_files:
        return
    if not all(Path(file).is_file() for file in task.validation_files):
        return  # `recipe check` names them
    try:
        held_out = listed_problems(task, "validation_files")
        check_num_validation(grpo.max_val_samples or 0, len(held_out), VALIDATION_FILES)
    except UserError as error:
        yield str(error)


def validation_sizes(recipe: Recipe) -> tuple[int, int] | None:
    """Problems and batch of NeMo-RL's validation by rollouts; None: there is none, or NeMo-Gym chooses."""
    problems, batch = recipe.grpo.max_val_samples, recipe.grpo.val_batch_size
    if problems is None or batch is None or not recipe.grpo.validates:
        return None
    return None if recipe.loss_fn.learns_from_demonstrations else (problems, batch)


@rule(Scope.CLUSTER)
def validation_has_a_whole_batch(recipe: Recipe) -> Iterator[str]:
    """`validate` of both versions fails with none; with a data plane it reports an accuracy of 0."""
    problems, batch = validation_sizes(recipe) or (0, 0)
    if problems < batch:
        yield (
            f"grpo.val_batch_size={batch} exceeds grpo.max_val_samples={problems}: NeMo-RL validates whole "
            "batches only, and fails where there is none; make them equal"
        )


@rule(Scope.CARE)
def validation_batches_divide_the_problems(recipe: Recipe) -> Iterator[str]:
    problems, batch = validation_sizes(recipe) or (0, 1)
    if problems >= batch and problems % batch:
        yield (
            f"grpo.val_batch_size={batch} does not divide grpo.max_val_samples={problems}: NeMo-RL "
            f"validates whole batches only, {problems - problems % batch} problems; make them equal"
        )


@rule(Scope.CLUSTER)
def fp8_kv_cache_needs_fp8_weights(recipe: Recipe) -> Iterator[str]:
    v = recipe.policy.generation.vllm_cfg
    if samples_with_vllm(recipe) and v.kv_cache_dtype != "auto" and v.precision != "fp8":
        yield (
            f"{VLLM}.kv_cache_dtype={v.kv_cache_dtype} needs {VLLM}.precision=fp8, not {v.precision}; set "
            "it, or use auto"
        )


@rule(Scope.CARE)
def fp8_needs_importance_sampling_correction(recipe: Recipe) -> Iterator[str]:
    if uses_fp8(recipe) and not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            "loss_fn.use_importance_sampling_correction=false: FP8 rounds differently in rollouts and in "
            "training, which the correction compensates; set it to true, or start from base/cluster-fp8.yaml"
        )


@rule(Scope.CLUSTER)
def vllm_layout_tiles_the_gpus(recipe: Recipe) -> Iterator[str]:
    if not samples_with_vllm(recipe):
        return
    v = recipe.policy.generation.vllm_cfg
    tp, pp, ep = v.tensor_parallel_size, v.pipeline_parallel_size, v.expert_parallel_size
    world, per_node = recipe.num_rollout_gpus or recipe.world_size, recipe.cluster.gpus_per_node
    if world % (tp * pp) or ((tp * pp) % per_node and per_node % (tp * pp)):
        yield (
            f"{VLLM}.tensor_parallel_size={tp} x pipeline_parallel_size={pp} does not tile the {world} GPUs "
            f"in nodes of {per_node}; use a divisor of {per_node}"
        )
    if pp > 1 and not v.async_engine:
        yield f"{VLLM}.pipeline_parallel_size={pp} needs {VLLM}.async_engine=true; set it, or use 1"
    if ep > 1 and ep % tp:
        yield f"{VLLM}.expert_parallel_size={ep} must be a multiple of tensor_parallel_size={tp}; use {tp}"


@rule(Scope.CLUSTER)
def separate_rollouts_leave_gpus_to_train(recipe: Recipe) -> Iterator[str]:
    colocated, c = recipe.policy.generation.colocated, recipe.cluster
    if colocated.enabled:
        return
    key, nodes = f"{GENERATION}.colocated.resources", colocated.resources.num_nodes or 0
    gpus = colocated.resources.gpus_per_node or 0
    if c.num_nodes == 1 and (not 0 < gpus < c.gpus_per_node or nodes > 1):
        yield (
            f"{key}.gpus_per_node={gpus}: separate rollouts (colocated.enabled=false) take some of the "
            f"node's {c.gpus_per_node} GPUs and leave at least one to train; use fewer, and num_nodes=1"
        )
    if c.num_nodes > 1 and (not 0 < nodes < c.num_nodes or gpus != c.gpus_per_node):
        yield (
            f"{key}.num_nodes={nodes}, gpus_per_node={gpus}: separate rollouts (colocated.enabled=false) "
            f"take whole nodes of the {c.num_nodes}; use 1 to {c.num_nodes - 1}, and "
            f"gpus_per_node={c.gpus_per_node}"
        )


@rule(Scope.CLUSTER)
def vllm_max_model_len_covers_the_longest_sequence(recipe: Recipe) -> Iterator[str]:
    length, longest = recipe.policy.max_total_sequence_length, recipe.policy.generation.vllm_cfg.max_model_len
    if samples_with_vllm(recipe) and longest < length:
        yield (
            f"{VLLM}.max_model_len={longest} is less than policy.max_total_sequence_length={length}; make "
            "them equal"
        )


@rule(Scope.CLUSTER)
def async_grpo_settings_agree(recipe: Recipe) -> Iterator[str]:
    if not recipe.grpo.is_async:
        return
    key, grpo = "grpo.async_grpo.enabled=true", recipe.grpo
    unread = {
        "use_dynamic_sampling": grpo.use_dynamic_sampling,
        "reward_shaping.enabled": grpo.reward_shaping.enabled,
        "reward_scaling.enabled": grpo.reward_scaling.enabled,
    }
    for setting in (setting for setting, is_on in unread.items() if is_on):
        yield f"{key} does not work with grpo.{setting}=true; switch one of them off"
    if samples_with_vllm(recipe) and not recipe.policy.generation.vllm_cfg.async_engine:
        yield f"{key} needs {VLLM}.async_engine=true; set it"
    if recipe.policy.generation.colocated.enabled:
        yield f"{key} needs rollouts on separate GPUs; set {GENERATION}.colocated.enabled=false"


@rule(Scope.CLUSTER)
def async_grpo_needs_importance_sampling_correction(recipe: Recipe) -> Iterator[str]:
    if recipe.grpo.is_async and not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            "grpo.async_grpo.enabled=true: rollouts are older than the policy, and NeMo-RL refuses to train "
            "on them uncorrected; set loss_fn.use_importance_sampling_correction=true"
        )


@rule(Scope.CLUSTER)
def batch_multiplier_needs_dynamic_sampling(recipe: Recipe) -> Iterator[str]:
    factor = recipe.grpo.batch_multiplier
    if factor != 1 and not recipe.grpo.use_dynamic_sampling:
        yield f"grpo.batch_multiplier={factor:g} needs grpo.use_dynamic_sampling=true; set it, or use 1"


@rule(Scope.CLUSTER)
def max_rollout_turns_covers_the_task(recipe: Recipe) -> Iterator[str]:
    turns, task = recipe.grpo.max_rollout_turns, recipe.nemo_grpo.task
    if task is not None and turns < task.num_turns:
        yield (
            f"grpo.max_rollout_turns={turns}: a response to {task.name} takes up to {task.num_turns} turns, "
            f"and would end before its answer; use {task.num_turns}"
        )


@rule(Scope.CLUSTER)
def overlong_penalty_needs_responses_of_one_turn(recipe: Recipe) -> Iterator[str]:
    task, shaping = recipe.nemo_grpo.task, recipe.grpo.reward_shaping
    if task is None or not task.stop_texts:
        return
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        yield (
            "grpo.reward_shaping.enabled=true: NeMo-RL measures only the first turn of a response, but one "
            f"to {task.name} has several; set it to false"
        )


@rule(Scope.CARE)
def overlong_penalty_stays_in_its_bounds(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's penalty goes on growing beyond L_max (algorithms/reward_functions.py)."""
    shaping, longest = recipe.grpo.reward_shaping, recipe.policy.generation.max_new_tokens
    if not shaping.enabled or shaping.stop_properly_penalty_coef is not None:
        return
    if shaping.max_response_length < longest:
        yield (
            f"grpo.reward_shaping.max_response_length={shaping.max_response_length} is less than "
            f"policy.generation.max_new_tokens={longest}: NeMo-RL's penalty exceeds overlong_buffer_penalty "
            "between them; make them equal"
        )


@rule(Scope.CLUSTER)
def vllm_stops_at_the_end_of_a_turn(recipe: Recipe) -> Iterator[str]:
    stops, task = recipe.policy.generation.stop_strings, recipe.nemo_grpo.task
    skips = recipe.policy.generation.vllm_cfg.skip_tokenizer_init
    if task is None or not task.stop_texts:
        return
    if skips or (skips is None and not stops):
        yield (
            f"{GENERATION}.stop_strings={stops or 'null'}: NeMo-RL starts vLLM without a tokenizer, which "
            f"then cannot see where a turn of {task.name} ends; set it to [{', '.join(task.stop_texts)}], "
            f"and leave {VLLM}.skip_tokenizer_init out"
        )
