"""Rules about NeMo-RL's data plane and its single controller (``async_rl``). See `cluster_rules`.

The data plane brings batches to the workers past the driver. Its trainer, ``grpo_train_sync``, gives the
driver rewards, masks and logprobs, and takes advantages and a sample mask in return; no other column of a
step reaches the loss. The single controller, a trainer of its own, reads batches over it, trains on a step's
groups in chunks as they come, and lacks much of what the other trainers do with rewards and advantages.
"""

import math
from collections.abc import Iterator

from nemo_grpo.recipe import host
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM
from nemo_grpo.support.errors import as_yaml

ON, PLANE = "async_rl={..}", "data_plane.enabled=true"
BACKENDS = ("vllm", "sglang")
STREAMING = "async_rl.min_groups_for_streaming_train"
UNGATED = ("windowed", "custom")
"""Samplers for which the rollouts do not wait for the trainer, whatever room they need."""


@rule(Scope.CLUSTER)
def single_controller_has_its_parts(recipe: Recipe) -> Iterator[str]:
    """What `setup_single_controller` refuses, or what its workers lack."""
    if not recipe.has_single_controller:
        return
    generation = recipe.policy.generation
    if not recipe.uses_data_plane:
        yield f"{ON}: NeMo-RL's single controller reads its data plane; set data_plane.enabled=true"
    if not recipe.policy.megatron_cfg.enabled:
        yield f"{ON}: only NeMo-RL's Megatron workers train in chunks; set {MEGATRON}.enabled=true"
    if generation.backend not in BACKENDS:
        yield f"{ON} with {GENERATION}.backend={generation.backend}: use {' or '.join(BACKENDS)}"
    if generation.backend == "vllm" and not generation.vllm_cfg.async_engine:
        yield f"{ON} samples prompt by prompt; set {VLLM}.async_engine=true"
    if host.has_images(recipe):
        yield f"{ON} loads no processor for images; set async_rl=null, data_plane.enabled=false"
    if recipe.grpo.validates:
        yield f"{ON} never validates; set grpo.val_period=0, val_at_start=false, val_at_end=false"
    metric = recipe.checkpointing.metric_name
    if recipe.checkpointing.enabled and metric and not metric.startswith("train:"):
        yield (
            f"checkpointing.metric_name={metric} with {ON}, which never validates; use null, or a metric of "
            "training, such as train:reward"
        )


@rule(Scope.CLUSTER)
def single_controller_steps_add_up(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's `validate_single_controller_config`."""
    if recipe.async_rl is None:
        return
    prompts, groups = recipe.grpo.num_prompts_per_step, recipe.async_rl.min_groups_for_streaming_train
    if groups > prompts:
        yield f"{STREAMING}={groups} exceeds grpo.num_prompts_per_step={prompts}; use at most that"
    if recipe.num_updates_per_step != 1:
        yield (
            f"policy.train_global_batch_size={recipe.policy.train_global_batch_size} with {ON}: a step is "
            f"one update; use all its {recipe.num_sequences_per_step} responses"
        )
    sampler, room = recipe.async_rl.sampler, recipe.async_rl.max_buffered_rollouts
    needed = prompts * (sampler.ahead + 1)
    if sampler.name not in UNGATED and room < needed:
        yield (
            f"async_rl.max_buffered_rollouts={room}: {sampler.name} with {sampler.ahead_key}={sampler.ahead} "
            f"waits for {needed} groups; use at least that"
        )


@rule(Scope.CLUSTER)
def chunks_of_a_step_are_independent(recipe: Recipe) -> Iterator[str]:
    """The estimator sees a chunk's groups, not the step's."""
    if recipe.async_rl is None or recipe.loss_fn.is_stock:
        return
    variant, prompts = recipe.loss_fn, recipe.grpo.num_prompts_per_step
    groups = recipe.async_rl.min_groups_for_streaming_train
    if groups >= prompts:
        return
    if variant.found.spans_groups:
        yield (
            f"{STREAMING}={groups}: {variant.variant} as set decides a response's advantages by other "
            f"groups, too; set it to {prompts}, for one chunk a step"
        )
    masked = recipe.grpo.seq_logprob_error_threshold
    if variant.aggregation == "group_token_mean" and masked is not None:
        yield (
            f"grpo.seq_logprob_error_threshold={masked:g} leaves groups of different sizes, which "
            f"loss_fn.aggregation=group_token_mean would weigh by chunks; set it to null, or {STREAMING} to "
            f"{prompts}"
        )


@rule(Scope.CLUSTER)
def chunks_divide_among_ranks(recipe: Recipe) -> Iterator[str]:
    """A chunk is any number of groups; the workers split it evenly, into whole microbatches unless packed."""
    policy, prompts = recipe.policy, recipe.grpo.num_prompts_per_step
    if recipe.async_rl is None or recipe.async_rl.min_groups_for_streaming_train >= prompts:
        return
    unit = recipe.data_parallel_size
    if not policy.batches_by_tokens:
        unit *= math.lcm(policy.train_micro_batch_size, policy.logprob_batch_size)
    if (size := recipe.grpo.num_generations_per_prompt) % unit:
        yield (
            f"grpo.num_generations_per_prompt={size} is not a multiple of {unit}, by which a chunk of groups "
            f"is split over ranks and microbatches; use one, or set {STREAMING} to {prompts}"
        )


@rule(Scope.CARE)
def single_controller_reads_the_keys(recipe: Recipe) -> Iterator[str]:
    """Settings of `grpo` that NeMo-RL's other trainers carry out and this one does not read."""
    if not recipe.has_single_controller:
        return
    grpo = recipe.grpo
    ignored = {
        "use_dynamic_sampling": grpo.use_dynamic_sampling,
        "overlong_filtering": grpo.overlong_filtering,
        "reward_shaping.enabled": grpo.reward_shaping.enabled,
        "reward_scaling.enabled": grpo.reward_scaling.enabled,
        "advantage_clip_low": grpo.advantage_clip_low,
        "advantage_clip_high": grpo.advantage_clip_high,
        "invalid_tool_call_advantage": grpo.invalid_tool_call_advantage,
        "malformed_thinking_advantage": grpo.malformed_thinking_advantage,
    }
    for key, value in ignored.items():
        if value is not None and value is not False:
            off = "false" if value is True else "null"
            yield f"grpo.{key}={as_yaml(value)} has no effect with {ON}; set it to {off}, or leave that out"


@rule(Scope.ADVICE)
def older_rollouts_are_corrected(recipe: Recipe) -> Iterator[str]:
    if recipe.async_rl is None or not recipe.rollouts_ahead:
        return
    if not recipe.loss_fn.use_importance_sampling_correction:
        yield (
            f"async_rl.sampler.name={recipe.async_rl.sampler.name}: rollouts are older than the policy, and "
            "the loss takes them for its own; set loss_fn.use_importance_sampling_correction=true"
        )


@rule(Scope.CLUSTER)
def data_plane_trains_synchronously(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's ``async_grpo_train`` keeps its own replay buffer, and SFT has no rollouts."""
    if not recipe.uses_data_plane:
        return
    if recipe.grpo.is_async:
        yield (
            f"{PLANE} with grpo.async_grpo.enabled=true: NeMo-RL's asynchronous trainer does not read the "
            "data plane; set one of them to false"
        )
    if recipe.loss_fn.learns_from_demonstrations:
        yield f"{PLANE}: {recipe.loss_fn.variant} trains without rollouts; set it to false"


@rule(Scope.CLUSTER)
def data_plane_brings_what_the_loss_reads(recipe: Recipe) -> Iterator[str]:
    if not recipe.uses_data_plane:
        return
    variant = recipe.loss_fn
    if variant.needs_entropy:
        yield (
            f"{PLANE}: {variant.variant} needs the policy's entropies, and NeMo-RL's workers write only "
            "logprobs to the data plane; set it to false"
        )
    if getattr(variant, "weighting", None) == "random" and not recipe.policy_is_scored:
        yield (
            f"{PLANE} with force_on_policy_ratio=true leaves nothing by which loss_fn.weighting=random could "
            "draw for a response: neither its tokens nor its logprobs; set one of them to false"
        )
    if not variant.is_stock and not variant.found.folds:
        yield (
            f"{PLANE} brings the loss advantages alone, and the weights of {variant.variant} as set "
            f"(aggregation={variant.aggregation}) reach beyond them, into a KL penalty or a clip; set it to "
            "false, or reference_policy_kl_penalty=0, or weight the clipped term from outside"
        )


@rule(Scope.CLUSTER)
def data_plane_sets_no_advantages_by_message(recipe: Recipe) -> Iterator[str]:
    """``grpo_train_sync`` raises an error at its start."""
    if not recipe.uses_data_plane or recipe.has_single_controller:
        return
    for key in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        if (value := getattr(recipe.grpo, key)) is not None:
            yield f"grpo.{key}={value:g} with {PLANE} is not supported by NeMo-RL; set it to null"


@rule(Scope.CLUSTER)
def weighted_advantages_are_not_clipped(recipe: Recipe) -> Iterator[str]:
    if not recipe.uses_data_plane or recipe.loss_fn.aggregation != "group_token_mean":
        return
    if recipe.has_single_controller:  # which clips none
        return
    for key in ("advantage_clip_low", "advantage_clip_high"):
        if (value := getattr(recipe.grpo, key)) is not None:
            yield (
                f"grpo.{key}={value:g} with {PLANE} and aggregation=group_token_mean would clip advantages "
                "that carry the weights of their groups; set it to null, or data_plane.enabled to false"
            )


@rule(Scope.CLUSTER)
def data_plane_draws_whole_groups(recipe: Recipe) -> Iterator[str]:
    """``grpo_train_sync`` drops rows whose std is 0; no function of it selects groups in another way."""
    if not (recipe.uses_data_plane and recipe.grpo.use_dynamic_sampling) or recipe.loss_fn.is_stock:
        return
    if recipe.has_single_controller:  # which draws none
        return
    off = "set data_plane.enabled or grpo.use_dynamic_sampling to false"
    if recipe.loss_fn.sampling_keys:
        yield (
            f"{PLANE} with grpo.use_dynamic_sampling=true: NeMo-RL then selects groups by itself, without "
            f"{recipe.loss_fn.variant}'s {' and '.join(recipe.loss_fn.sampling_keys)}; {off}"
        )
    elif recipe.grpo.use_leave_one_out_baseline is not False:
        yield (
            f"{PLANE} with grpo.use_dynamic_sampling=true and grpo.use_leave_one_out_baseline=true: NeMo-RL "
            "then drops the only correct response of a group, whose own std is 0; set the last one to false"
        )
