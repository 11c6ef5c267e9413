"""Rules that need the model's shape, the GPU, or both: what must divide what, and what must fit.

Each yields ``key=value: rule; remedy`` for every violation, like the rules of `nemo_grpo.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_grpo.plan import memory
from nemo_grpo.plan.memory import GIB, USABLE
from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.shapes import WITHOUT_CONVERSION, ModelShape
from nemo_grpo.recipe.cluster_rules import MEGATRON, VLLM

BLOCK = 128
"""Width of a block that shares one FP8 scale."""

Rule = Callable[[ModelShape, Setup], Iterator[str]]


def model_can_be_converted(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if shape.model_type in WITHOUT_CONVERSION:
        yield (
            f"policy.model_name={shape.name}: Megatron-Bridge has no conversion for {shape.model_type}; use "
            "Qwen/Qwen2.5-VL-3B-Instruct"
        )


def tensor_parallel_divides(shape: ModelShape, setup: Setup) -> Iterator[str]:
    yield from _splits(shape, f"{MEGATRON}.tensor_model_parallel_size", setup.layout.tensor)


def rollout_parallel_divides(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.has_rollouts:
        yield from _splits(shape, f"{VLLM}.tensor_parallel_size", setup.vllm_tensor)


def _splits(shape: ModelShape, key: str, size: int) -> Iterator[str]:
    heads, kv = shape.num_attention_heads, shape.num_key_value_heads
    fits = [n for n in range(1, heads + 1) if not heads % n and not (kv % n and n % kv)]
    if heads % size:
        yield (
            f"{key}={size} does not divide num_attention_heads={heads} of {shape.name}; use "
            f"{_near(fits, size)}"
        )
    elif kv % size and size % kv:
        yield (
            f"{key}={size} neither divides nor is a multiple of num_key_value_heads={kv} of {shape.name}; "
            f"use {_near(fits, size)}"
        )
    elif not shape.num_experts and shape.ffn_size % size:
        yield (
            f"{key}={size} does not divide intermediate_size={shape.ffn_size} of {shape.name}; use a divisor"
        )
    elif shape.vocab_size % size:
        yield f"{key}={size} does not divide vocab_size={shape.vocab_size} of {shape.name}; use a divisor"


def tensor_parallel_stays_on_a_node(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.gpus_per_node % setup.layout.tensor:
        yield (
            f"{MEGATRON}.tensor_model_parallel_size={setup.layout.tensor} does not divide the "
            f"{setup.gpus_per_node} GPUs of a node, so layers would be reduced over the network; use a "
            "divisor"
        )


def stages_divide_the_layers(shape: ModelShape, setup: Setup) -> Iterator[str]:
    layout = setup.layout
    given = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    rest, stages = shape.num_layers - sum(given), layout.pipeline - len(given)
    if stages < 0 or rest < stages or (stages and rest % stages) or (not stages and rest):
        divisors = [n for n in range(1, shape.num_layers + 1) if not shape.num_layers % n]
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size={layout.pipeline} leaves {rest} of the "
            f"{shape.num_layers} layers of {shape.name} for {stages} equal stages; use "
            f"{_near(divisors, layout.pipeline)}, or set num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage"
        )


def experts_divide(shape: ModelShape, setup: Setup) -> Iterator[str]:
    ep, etp, experts = setup.layout.expert, setup.layout.expert_tensor, shape.num_experts
    if not experts and ep * etp > 1:
        yield f"{MEGATRON}.expert_model_parallel_size={ep}: {shape.name} has no experts; use 1"
    elif experts and experts % ep:
        yield (
            f"{MEGATRON}.expert_model_parallel_size={ep} does not divide num_experts={experts}; use a divisor"
        )
    elif experts and shape.ffn_size % etp:
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size={etp} does not divide "
            f"moe_intermediate_size={shape.ffn_size}; use 1"
        )


def sequences_fit_the_model(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.max_length > shape.max_position_embeddings:
        yield (
            f"policy.max_total_sequence_length={setup.max_length} exceeds "
            f"max_position_embeddings={shape.max_position_embeddings} of {shape.name}; lower it"
        )


def fp8_blocks_are_whole(shape: ModelShape, setup: Setup) -> Iterator[str]:
    used = []
    if setup.fp8_training and setup.fp8_recipe == "blockwise":
        used.append(
            (f"{MEGATRON}.tensor_model_parallel_size", setup.layout.tensor, setup.layout.expert_tensor)
        )
    if setup.vllm_fp8 and setup.has_rollouts:
        used.append((f"{VLLM}.tensor_parallel_size", setup.vllm_tensor, setup.vllm_tensor))
    for key, size, expert_size in used:
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


def fp8_recipe_is_for_this_gpu(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.fp8_recipe == "mxfp8":
        yield f"{MEGATRON}.fp8_cfg.fp8_recipe=mxfp8 needs Blackwell; on H100 and H200 use blockwise"


def images_are_not_packed(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if shape.num_vision_parameters and setup.layout.context > 1:
        yield (
            f"{MEGATRON}.context_parallel_size={setup.layout.context}: the images of {shape.name} are not "
            "split over ranks; use 1"
        )


def training_fits(shape: ModelShape, setup: Setup, gpu_bytes: int) -> Iterator[str]:
    stage = memory.heaviest_stage(shape, setup)
    parts = memory.training_bytes(shape, setup, stage)
    need, scoring = sum(parts.values()), memory.scoring_bytes(shape, setup, setup.layout.pipeline - 1)
    if need > USABLE * gpu_bytes:
        worst = max((name for name in parts if name != "allowance"), key=lambda name: parts[name])
        yield (
            f"{MEGATRON}.tensor_model_parallel_size={setup.layout.tensor}, pipeline {setup.layout.pipeline}, "
            f"context {setup.layout.context}: training needs {need / GIB:.1f} GiB per GPU of "
            f"{USABLE * gpu_bytes / GIB:.1f} usable, most of it {worst} ({parts[worst] / GIB:.1f}); "
            f"{_REMEDIES['optimizer, embedded' if setup.embedded and worst == 'optimizer' else worst]}"
        )
    elif scoring > USABLE * gpu_bytes:
        yield (
            f"policy.sequence_packing.logprob_mb_tokens={setup.score_tokens}: scoring so many at once needs "
            f"{scoring / GIB:.1f} GiB per GPU of {USABLE * gpu_bytes / GIB:.1f} usable; lower "
            "policy.logprob_batch_size"
        )


def rollouts_fit(shape: ModelShape, setup: Setup, gpu_bytes: int) -> Iterator[str]:
    if not setup.has_rollouts:
        return
    room = memory.cache_bytes(shape, setup, gpu_bytes)
    sequence = setup.max_length * memory.cache_bytes_per_token(shape, setup)
    refit = memory.refit_bytes(shape, setup, memory.heaviest_stage(shape, setup))
    if room < sequence:
        yield (
            f"{VLLM}.gpu_memory_utilization={setup.vllm_share}: after weights of "
            f"{memory.rollout_weight_bytes(shape, setup) / GIB:.1f} GiB there is {max(room, 0) / GIB:.1f} "
            f"GiB for keys and values, and one sequence of {setup.max_length} tokens needs "
            f"{sequence / GIB:.1f}; raise it, or tensor_parallel_size"
        )
    if not setup.num_rollout_gpus and refit > USABLE * gpu_bytes:
        yield (
            f"{VLLM}.tensor_parallel_size={setup.vllm_tensor}: policy and rollout weights together need "
            f"{refit / GIB:.1f} GiB per GPU of {USABLE * gpu_bytes / GIB:.1f} usable when they are handed "
            "over; raise it, or TP"
        )


_REMEDIES = {
    "weights": "raise TP or PP, or EP for experts",
    "gradients": "raise TP or PP",
    "optimizer": "use the distributed optimizer, more nodes, or optimizer_cpu_offload",
    "optimizer, embedded": "use the distributed optimizer, or more nodes",
    "activations": "set activation_checkpointing=true, lower train_micro_batch_size, or raise TP or CP",
    "logits": "lower train_micro_batch_size, raise TP or CP, or set policy.logprob_chunk_size",
}

SHAPE_RULES: tuple[Rule, ...] = (
    model_can_be_converted,
    tensor_parallel_divides,
    rollout_parallel_divides,
    tensor_parallel_stays_on_a_node,
    stages_divide_the_layers,
    experts_divide,
    sequences_fit_the_model,
    fp8_blocks_are_whole,
    fp8_recipe_is_for_this_gpu,
    images_are_not_packed,
)
"""Rules about shape and layout. Memory is looked at only where they hold."""

MEMORY_RULES = (training_fits, rollouts_fit)
"""Rules about memory."""


def problems(shape: ModelShape, setup: Setup, gpu_bytes: int) -> list[str]:
    """All messages for one layout on one kind of GPU."""
    found = [message for rule in SHAPE_RULES for message in rule(shape, setup)]
    if not found:
        found = [message for rule in MEMORY_RULES for message in rule(shape, setup, gpu_bytes)]
    return found


def _near(values: list[int], wanted: int) -> str:
    """The values next to ``wanted``, below and above."""
    chosen = {max((v for v in values if v < wanted), default=min(values))}
    chosen |= {v for v in values if v > wanted and v == min(u for u in values if u > wanted)}
    return " or ".join(map(str, sorted(chosen)))
