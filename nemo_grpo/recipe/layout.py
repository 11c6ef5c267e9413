"""Layout: the sizes of model parallelism, and reasons why a model cannot be split into them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_grpo.models import ModelSpec

_KEY = "policy.megatron_cfg"

MOST_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Largest number of logits that a rank computes at once, by device. More take memory, fewer take time."""


@dataclass(frozen=True)
class Layout:
    """Sizes of model parallelism. The number of ranks divided by them is the data-parallel size.

    Attributes:
        tensor, pipeline, context, expert, expert_tensor: Sizes of the dimensions; 1 turns one off.
        sequence_parallel: True if each tensor-parallel rank holds a part of the sequence between the
            tensor-parallel layers.
        first_stage_layers, last_stage_layers: Number of layers in the first and last pipeline stage, if it
            differs from that of the other stages.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes TP, PP and CP, whose product is the number of ranks of a replica."""
        return (self.tensor, self.pipeline, self.context)

    @property
    def sequence_multiple(self) -> int:
        """Divisor of the padded sequence length: 2 CP, times TP with sequence_parallel."""
        multiple = 1
        if self.context > 1:
            # Each context-parallel rank has two chunks, one from the front and one from the back, because
            # causal attention costs more towards the end of a sequence.
            multiple *= 2 * self.context
        if self.sequence_parallel:
            multiple *= self.tensor
        return multiple

    def tokens_at_once(self, vocab_size: int, device: str = "cpu") -> int:
        """Return the number of tokens whose logits the embedded engine holds at once."""
        return max(1, MOST_LOGITS[device] * self.tensor // vocab_size)

    def stage_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage, like megatron-core's get_num_layers_to_build.

        If the layers do not divide evenly, the numbers are rounded down; `stage_refusals` refuses that case.
        """
        num_equal_layers, num_equal_stages = self.equal_part(num_layers)
        stages = []
        if self.first_stage_layers is not None:
            stages.append(self.first_stage_layers)
        if num_equal_stages > 0:
            stages += [num_equal_layers // num_equal_stages] * num_equal_stages
        if self.last_stage_layers is not None:
            stages.append(self.last_stage_layers)
        return stages

    def equal_part(self, num_layers: int) -> tuple[int, int]:
        """Return the numbers of layers and stages that remain without stages of a size of their own."""
        num_stages = self.pipeline
        for stage_layers in (self.first_stage_layers, self.last_stage_layers):
            if stage_layers is not None:
                num_layers -= stage_layers
                num_stages -= 1
        return num_layers, num_stages


def width_refusals(
    spec: ModelSpec, key: str, size: int, *, per_node: int | None = None, embedded: bool = False
) -> Iterator[str]:
    """Yield reasons why a model's matrices cannot be split over this number of tensor-parallel ranks.

    Args:
        spec: Shape of the model.
        key: Key of the recipe that sets the number of ranks, for messages.
        size: Number of ranks.
        per_node: GPUs of a node, if the sizes that a remedy names must divide it.
        embedded: True for the embedded engine, which gives each rank key heads of its own and pads the
            vocabulary. On the cluster ranks may share a key head, and the vocabulary must divide.
    """
    num_heads = spec.num_attention_heads
    num_key_heads = spec.num_key_value_heads

    def divides_key_heads(ranks: int) -> bool:
        if num_key_heads % ranks == 0:
            return True
        # On the cluster several ranks may hold copies of the same key head.
        return not embedded and ranks % num_key_heads == 0

    sizes = [ranks for ranks in range(1, num_heads + 1) if per_node is None or per_node % ranks == 0]
    fitting = [ranks for ranks in sizes if num_heads % ranks == 0 and divides_key_heads(ranks)]
    if num_heads % size:
        yield (
            f"{key}={size} does not divide num_attention_heads={num_heads} of {spec.name}; use "
            f"{_near(fitting, size)}"
        )
    elif not divides_key_heads(size):
        rule = "does not divide" if embedded else "neither divides nor is a multiple of"
        yield (
            f"{key}={size} {rule} num_key_value_heads={num_key_heads} of {spec.name}; use "
            f"{_near(fitting, size)}"
        )
    # In a model with experts this width is that of an expert, which expert tensor parallelism splits instead.
    elif not spec.num_experts and spec.ffn_size % size:
        yield f"{key}={size} does not divide intermediate_size={spec.ffn_size} of {spec.name}; use a divisor"
    elif not embedded and spec.vocab_size % size:
        yield f"{key}={size} does not divide vocab_size={spec.vocab_size} of {spec.name}; use a divisor"


def stage_refusals(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield reasons why the layers cannot be split into these pipeline stages."""
    if _has_equal_stages(spec, layout):
        return
    num_layers, num_stages = layout.equal_part(spec.num_layers)
    divisors = [stages for stages in range(1, spec.num_layers + 1) if spec.num_layers % stages == 0]
    yield (
        f"{_KEY}.pipeline_model_parallel_size={layout.pipeline} leaves {num_layers} of the {spec.num_layers} "
        f"layers of {spec.name} for {num_stages} equal stages; use {_near(divisors, layout.pipeline)}, or "
        "set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    )


def _has_equal_stages(spec: ModelSpec, layout: Layout) -> bool:
    """True if the stages whose number of layers is not set can share the remaining layers equally."""
    num_layers, num_stages = layout.equal_part(spec.num_layers)
    if num_stages == 0:
        return num_layers == 0
    # Fewer layers than stages, or a negative number, would leave a stage empty.
    return num_stages > 0 and num_layers >= num_stages and num_layers % num_stages == 0


def expert_refusals(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield reasons why the experts cannot be split over these ranks."""
    num_experts = spec.num_experts
    if not num_experts:
        if layout.expert * layout.expert_tensor > 1:
            yield f"{_KEY}.expert_model_parallel_size={layout.expert}: {spec.name} has no experts; use 1"
        return
    if num_experts % layout.expert:
        yield (
            f"{_KEY}.expert_model_parallel_size={layout.expert} does not divide num_experts={num_experts}; "
            "use a divisor"
        )
    elif spec.ffn_size % layout.expert_tensor:
        yield (
            f"{_KEY}.expert_tensor_parallel_size={layout.expert_tensor} does not divide "
            f"moe_intermediate_size={spec.ffn_size}; use 1"
        )
    # megatron-core (transformer/moe/moe_layer) would raise an error only in the first forward pass.
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            f"{_KEY}.sequence_parallel=false with tensor_model_parallel_size={layout.tensor}: megatron-core "
            f"trains experts, which {spec.name} has, under TP only with sequence parallelism; set it to true"
        )


def _near(values: list[int], size: int) -> str:
    """Name the nearest values below and above a size. If none is below, the smallest value is named."""
    below = max((value for value in values if value < size), default=min(values))
    above = [value for value in values if value > size]
    nearest = {below}
    if above:
        nearest.add(min(above))
    return " or ".join(map(str, sorted(nearest)))
