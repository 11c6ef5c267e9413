"""Layout of a model replica over the ranks, and reasons why a model cannot be split that way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_grpo.models import ModelSpec

_KEY = "policy.megatron_cfg"

MOST_LOGITS = {"cpu": 2**25, "cuda": 2**27}
"""Most logits that a rank computes per chunk, by device; smaller chunks are slower."""


@dataclass(frozen=True)
class Layout:
    """Division of the world; data parallelism takes the rest.

    Attributes:
        tensor, pipeline, context, expert, expert_tensor: sizes of the model-parallel dimensions, 1 = off.
        sequence_parallel: between the tensor-parallel layers each tensor rank has its share of the sequence.
        first_stage_layers, last_stage_layers: uneven pipeline; None: the same for all stages.
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
        """(TP, PP, CP)."""
        return (self.tensor, self.pipeline, self.context)

    @property
    def sequence_multiple(self) -> int:
        """Multiple to which sequences are padded: 2 CP, times TP with sequence_parallel."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence_parallel else 1)

    def tokens_at_once(self, vocab_size: int, device: str = "cpu") -> int:
        """Count the tokens whose logits the embedded engine holds at once."""
        return max(1, MOST_LOGITS[device] * self.tensor // vocab_size)

    def stage_layers(self, num_layers: int) -> list[int]:
        """Deal the layers out to pipeline stages, as megatron-core's ``get_num_layers_to_build`` does.

        Rounds down where they do not divide, which `stage_refusals` refuses.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        rest = num_layers - (first or 0) - (last or 0)
        inner = self.pipeline - (first is not None) - (last is not None)
        each = rest // inner if inner > 0 else 0
        middle = [each] * max(inner, 0)
        return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def width_refusals(
    spec: ModelSpec, key: str, size: int, *, per_node: int | None = None, embedded: bool = False
) -> Iterator[str]:
    """Yield reasons why the tensor-parallel size under this key does not divide the model.

    Args: per_node: GPUs of a node, divisible by every size in a remedy.
          embedded: as the embedded engine divides a model, with key heads of its own on every rank and a
          padded vocabulary; else ranks may share a key head.
    """
    heads, kv = spec.num_attention_heads, spec.num_key_value_heads
    sizes = [n for n in range(1, heads + 1) if per_node is None or not per_node % n]
    fits = [n for n in sizes if not heads % n and (not kv % n or not (embedded or n % kv))]
    if heads % size:
        yield (
            f"{key}={size} does not divide num_attention_heads={heads} of {spec.name}; use "
            f"{_near(fits, size)}"
        )
    elif kv % size and (embedded or size % kv):
        rule = "does not divide" if embedded else "neither divides nor is a multiple of"
        yield f"{key}={size} {rule} num_key_value_heads={kv} of {spec.name}; use {_near(fits, size)}"
    elif not spec.num_experts and spec.ffn_size % size:
        yield f"{key}={size} does not divide intermediate_size={spec.ffn_size} of {spec.name}; use a divisor"
    elif not embedded and spec.vocab_size % size:
        yield f"{key}={size} does not divide vocab_size={spec.vocab_size} of {spec.name}; use a divisor"


def stage_refusals(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield reasons why the layers cannot be split into these pipeline stages."""
    given = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    rest, stages = spec.num_layers - sum(given), layout.pipeline - len(given)
    if stages < 0 or rest < stages or (stages and rest % stages) or (not stages and rest):
        near = _near([n for n in range(1, spec.num_layers + 1) if not spec.num_layers % n], layout.pipeline)
        yield (
            f"{_KEY}.pipeline_model_parallel_size={layout.pipeline} leaves {rest} of the {spec.num_layers} "
            f"layers of {spec.name} for {stages} equal stages; use {near}, or set "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )


def expert_refusals(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield reasons why the experts cannot be split over these ranks."""
    ep, etp, experts = layout.expert, layout.expert_tensor, spec.num_experts
    if not experts and ep * etp > 1:
        yield f"{_KEY}.expert_model_parallel_size={ep}: {spec.name} has no experts; use 1"
    elif experts and experts % ep:
        yield f"{_KEY}.expert_model_parallel_size={ep} does not divide num_experts={experts}; use a divisor"
    elif experts and spec.ffn_size % etp:
        yield (
            f"{_KEY}.expert_tensor_parallel_size={etp} does not divide "
            f"moe_intermediate_size={spec.ffn_size}; use 1"
        )
    # megatron-core's MoE layer raises a ValueError in the first training forward (transformer/moe/moe_layer).
    if experts and layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            f"{_KEY}.sequence_parallel=false with tensor_model_parallel_size={layout.tensor}: megatron-core "
            f"trains experts, which {spec.name} has, under TP only with sequence parallelism; set it to true"
        )


def _near(values: list[int], wanted: int) -> str:
    """List the values next to ``wanted``, below and above."""
    chosen = {max((v for v in values if v < wanted), default=min(values))}
    chosen |= {v for v in values if v > wanted and v == min(u for u in values if u > wanted)}
    return " or ".join(map(str, sorted(chosen)))
