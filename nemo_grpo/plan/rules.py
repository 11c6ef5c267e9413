"""Rules that need the model's shape or the GPU: divisibility and memory; see `nemo_grpo.recipe.registry`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory, rollout_memory
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.inputs import PlanInput, plan_input, shape_of
from nemo_grpo.plan.memory import GIB, USABLE
from nemo_grpo.recipe.layout import expert_refusals, stage_refusals, width_refusals
from nemo_grpo.recipe.policy_sections import stop_refusals
from nemo_grpo.recipe.registry import Scope, messages, rule
from nemo_grpo.recipe.sections import MEGATRON, VLLM
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

BLOCK = 128
"""Width of a block that shares one FP8 scale."""


@rule(Scope.SHAPE)
def model_can_be_converted(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    if not shape.is_bridged:
        yield (
            f"policy.model_name={shape.name}: Megatron-Bridge has no conversion for {shape.model_type}; use "
            "Qwen/Qwen2.5-VL-3B-Instruct"
        )


@rule(Scope.SHAPE)
def tensor_parallel_divides_the_model(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    yield from width_refusals(
        shape,
        f"{MEGATRON}.tensor_model_parallel_size",
        setup.layout.tensor,
        per_node=setup.train_gpus_per_node,
        embedded=setup.embedded,
    )


@rule(Scope.SHAPE)
def rollout_parallel_divides_the_model(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    if not setup.has_rollouts:
        return
    samples_on_part_of_a_node = setup.num_nodes == 1 and setup.num_rollout_gpus > 0
    yield from width_refusals(
        shape,
        f"{VLLM}.tensor_parallel_size",
        setup.vllm_tensor,
        per_node=setup.num_rollout_gpus if samples_on_part_of_a_node else setup.gpus_per_node,
    )


@rule(Scope.SHAPE)
def tensor_parallel_stays_on_a_node(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    if setup.train_gpus_per_node % setup.layout.tensor:
        yield (
            f"{MEGATRON}.tensor_model_parallel_size={setup.layout.tensor} does not divide the "
            f"{setup.train_gpus_per_node} GPUs of a node that train, so layers would be reduced over the "
            "network; use a divisor"
        )


@rule(Scope.SHAPE)
def pipeline_stages_divide_the_layers(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    yield from stage_refusals(shape, setup.layout)


@rule(Scope.SHAPE)
def expert_parallel_divides_the_experts(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    yield from expert_refusals(shape, setup.layout)


@rule(Scope.SHAPE)
def sequences_fit_the_model(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    # The embedded engine's samplers end at max_position_embeddings, whatever the rotary scaling.
    longest = shape.max_position_embeddings if setup.embedded else shape.longest_sequence
    if setup.max_length <= longest:
        return
    with_scaling = ""
    if longest != shape.max_position_embeddings:
        with_scaling = f", {longest} with its rotary scaling"
    yield (
        f"policy.max_total_sequence_length={setup.max_length} exceeds "
        f"max_position_embeddings={shape.max_position_embeddings} of {shape.name}{with_scaling}; lower it"
    )


@rule(Scope.SHAPE)
def stop_tokens_are_in_the_vocabulary(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    yield from stop_refusals(setup.stop_token_ids, shape.vocab_size, shape.name)


@rule(Scope.SHAPE)
def fp8_blocks_divide_the_layers(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    # Layouts, of training and of vLLM, whose FP8 scales are per block, so that a rank must hold whole blocks:
    # (recipe key of the TP, TP, expert TP).
    layouts_in_blocks = []
    if setup.fp8_training and setup.fp8_recipe == "blockwise":
        layouts_in_blocks.append(
            (f"{MEGATRON}.tensor_model_parallel_size", setup.layout.tensor, setup.layout.expert_tensor)
        )
    if setup.vllm_fp8 and setup.has_rollouts:
        layouts_in_blocks.append((f"{VLLM}.tensor_parallel_size", setup.vllm_tensor, setup.vllm_tensor))
    for key, size, expert_size in layouts_in_blocks:
        widths = {
            "hidden_size": shape.hidden_size,
            "attention heads": shape.query_size // size,
            "feed-forward": shape.ffn_size // (expert_size if shape.num_experts else size),
        }
        broken = [f"{name} {width}" for name, width in widths.items() if width % BLOCK]
        if broken:
            yield (
                f"{key}={size}: blockwise FP8 has one scale per {BLOCK} columns, but a rank holds "
                f"{' and '.join(broken)} of {shape.name}; use a smaller one"
            )


@rule(Scope.MEMORY)
def fp8_recipe_is_for_this_gpu(shape: ModelSpec, setup: PlanInput, gpu: Hardware) -> Iterator[str]:
    """Transformer Engine's own conditions (quantization.py)."""
    if setup.fp8_recipe == "mxfp8" and gpu.compute_capability < 10:
        yield f"{MEGATRON}.fp8_cfg.fp8_recipe=mxfp8 needs Blackwell; on H100 and H200 use blockwise"
    if setup.fp8_training and setup.fp8_recipe == "blockwise" and 8.9 <= gpu.compute_capability < 9:
        yield f"{MEGATRON}.fp8_cfg.fp8_recipe=blockwise needs Hopper; on this GPU use tensorwise"


@rule(Scope.MEMORY)
def gpu_has_fp8(shape: ModelSpec, setup: PlanInput, gpu: Hardware) -> Iterator[str]:
    if gpu.fp8_flops:
        return
    if setup.fp8_training:
        yield f"{MEGATRON}.fp8_cfg.enabled=true: this GPU has no FP8; use false"
    if setup.vllm_fp8 and setup.has_rollouts:
        yield f"{VLLM}.precision=fp8: this GPU has no FP8; use bfloat16"


@rule(Scope.SHAPE)
def images_exclude_context_parallel(shape: ModelSpec, setup: PlanInput) -> Iterator[str]:
    if shape.num_vision_parameters and setup.layout.context > 1:
        yield (
            f"{MEGATRON}.context_parallel_size={setup.layout.context}: the images of {shape.name} are not "
            "split over ranks; use 1"
        )


@rule(Scope.MEMORY)
def training_fits_in_memory(shape: ModelSpec, setup: PlanInput, gpu: Hardware) -> Iterator[str]:
    stage = memory.heaviest_stage(shape, setup)
    parts = memory.training_bytes(shape, setup, stage)
    training = sum(parts.values())
    scoring = memory.scoring_bytes(shape, setup, setup.layout.pipeline - 1)
    usable = USABLE * gpu.memory_bytes
    if training > usable:
        # No key of a recipe changes the allowance.
        reducible = [name for name in parts if name != "allowance"]
        largest = max(reducible, key=lambda name: parts[name])
        yield (
            f"{MEGATRON}.tensor_model_parallel_size={setup.layout.tensor}, pipeline {setup.layout.pipeline}, "
            f"context {setup.layout.context}: training needs {training / GIB:.1f} GiB per GPU of "
            f"{usable / GIB:.1f} usable, most of it {largest} ({parts[largest] / GIB:.1f}); "
            f"{for_memory(largest, setup)}"
        )
    elif scoring > usable:
        yield (
            f"policy.sequence_packing.logprob_mb_tokens={setup.score_tokens}: scoring them at once needs "
            f"{scoring / GIB:.1f} GiB per GPU of {usable / GIB:.1f} usable; lower "
            "policy.logprob_batch_size"
        )


def for_memory(part: str, setup: PlanInput) -> str:
    """Name remedies that shrink a part of the training phase, without those that the recipe uses already."""
    has_several_rows = setup.train_tokens > setup.max_length
    # Part -> remedy -> whether it is still open.
    remedies = {
        "reference": {"leave out the KL penalty": setup.has_penalty, "train adapters": True},
        "sampler": {"use target=cluster": True},
        "weights": {"raise TP or PP": True, "EP for experts": True},
        "gradients": {"raise TP or PP": True},
        "optimizer": {
            "use the distributed optimizer": not setup.distributed_optimizer,
            "more nodes": True,
            "optimizer_cpu_offload": not setup.embedded and not setup.offload_fraction,
        },
        "activations": {
            "set activation_checkpointing=true": "full" not in setup.recompute,
            "lower train_micro_batch_size": has_several_rows,
            "raise TP or CP": True,
        },
        "logits": {
            "lower train_micro_batch_size": has_several_rows,
            "raise TP or CP": True,
            "set policy.logprob_chunk_size": not setup.logprob_chunk,
        },
    }
    return ", or ".join(remedy for remedy, is_open in remedies[part].items() if is_open)


@rule(Scope.MEMORY)
def rollouts_fit_in_memory(shape: ModelSpec, setup: PlanInput, gpu: Hardware) -> Iterator[str]:
    if not setup.has_rollouts:
        return
    cache = rollout_memory.cache_bytes(shape, setup, int(gpu.memory_bytes))
    sequence = setup.max_length * rollout_memory.cache_bytes_per_token(shape, setup)
    if cache < sequence:
        weights = rollout_memory.rollout_weight_bytes(shape, setup)
        yield (
            f"{VLLM}.gpu_memory_utilization={setup.vllm_share}: after weights of "
            f"{weights / GIB:.1f} GiB there is {max(cache, 0) / GIB:.1f} "
            f"GiB for keys and values, and one sequence of {setup.max_length} tokens needs "
            f"{sequence / GIB:.1f}; raise it, or tensor_parallel_size"
        )
    refit = rollout_memory.refit_bytes(shape, setup, memory.heaviest_stage(shape, setup))
    usable = USABLE * gpu.memory_bytes
    # Rollouts with GPUs of their own get the weights over the network.
    if not setup.num_rollout_gpus and refit > usable:
        yield (
            f"{VLLM}.tensor_parallel_size={setup.vllm_tensor}: policy and rollout weights together need "
            f"{refit / GIB:.1f} GiB per GPU of {usable / GIB:.1f} usable when they are "
            "handed over; raise it, or TP"
        )


def shape_problems(recipe: Recipe) -> list[str]:
    """List the broken rules of a recipe that hold for any GPU; none if the model's shape is not known."""
    try:
        shape = shape_of(recipe)
    except UserError:
        return []
    if recipe.policy.dtensor_cfg.enabled:  # the planner knows megatron-core's layouts only
        return []
    return messages(Scope.SHAPE, shape, plan_input(recipe))


def problems(shape: ModelSpec, setup: PlanInput, gpu: Hardware) -> list[str]:
    """List the messages about all broken rules of one layout on one kind of GPU."""
    shape_messages = messages(Scope.SHAPE, shape, setup)
    # The formulas of memory divide by the layout, so it must divide the model first.
    if shape_messages:
        return shape_messages
    return messages(Scope.MEMORY, shape, setup, gpu)
