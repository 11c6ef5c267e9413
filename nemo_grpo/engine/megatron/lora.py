"""LoRA (Hu et al. 2021) on megatron-core's parallel linear layers: y = W x + alpha / dim B A x, W frozen.

A [dim, in] and B [out, dim] are cut over the tensor-parallel ranks as follows:

    layer             W cut along   A                 B                  with sequence parallelism
    qkv, fc1 (column) the output    on every rank     cut as W           B's input is gathered
    proj, fc2 (row)   the input     cut as W          on every rank      A's partial sums are scattered

Only the activation between A and B, which is ``dim`` wide, is communicated. An adapter is a submodule of its
layer, so W keeps its name. A forward hook adds the adapter's output to the layer's output. Transformer
Engine's layers that include the norm before them also return the norm's output, which the hook needs as
input. Names, shapes and checkpoint keys are Megatron-Bridge's: ``<layer>.adapter.linear_in.weight`` is A, and
``<layer>.adapter.linear_out.weight`` is B.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from nemo_grpo.engine.megatron.hf_weights import HFWeights, cut_of, local_shard
from nemo_grpo.recipe.megatron_sections import LORA_LAYERS

_A = ".adapter.linear_in.weight"
_B = ".adapter.linear_out.weight"

# (column parallel, sequence parallel) -> communication of A's output between the ranks. The backward pass of
# each function completes the gradient that reaches A: by a sum over the ranks for column-parallel layers, by
# a gather or nothing for row-parallel layers.
_BETWEEN = {
    (True, False): copy_to_tensor_model_parallel_region,
    (True, True): gather_from_sequence_parallel_region,
    (False, False): reduce_from_tensor_model_parallel_region,
    (False, True): reduce_scatter_to_sequence_parallel_region,
}


@dataclass(frozen=True)
class LoRASettings:
    """Rank, scale and layers of the adapters.

    Attributes:
        dim: Rank of A and B.
        alpha: Numerator of the scale alpha / dim, by which B A is multiplied.
        targets: Names of the adapted layers, out of `LORA_LAYERS`.
    """

    dim: int
    alpha: int
    targets: tuple[str, ...] = LORA_LAYERS

    @property
    def scale(self) -> float:
        return self.alpha / self.dim


class Adapter(torch.nn.Module):
    """Adapter of one parallel linear layer: computes (alpha / dim) B A x with this rank's part of A and B.

    The layer must have ``sequence_parallel``, ``tp_group``, and a ``weight`` with megatron-core's
    ``partition_dim``.
    """

    def __init__(self, linear: torch.nn.Module, settings: LoRASettings) -> None:
        super().__init__()
        weight: Any = linear.weight
        sequence_parallel = bool(linear.sequence_parallel)
        is_column_parallel = weight.partition_dim == 0
        self.scale = settings.scale
        self.group = linear.tp_group
        self.between = _BETWEEN[is_column_parallel, sequence_parallel]
        self.linear_in = _linear_of(weight.new_zeros(settings.dim, weight.shape[1]))
        self.linear_out = _linear_of(weight.new_zeros(weight.shape[0], settings.dim))
        if is_column_parallel:
            cut = self.linear_out.weight
            whole = self.linear_in.weight
        else:
            cut = self.linear_in.weight
            whole = self.linear_out.weight
        # The gradient norm counts a parameter without these attributes on one rank only.
        set_tensor_model_parallel_attributes(cut, True, weight.partition_dim, weight.partition_stride)
        # Under sequence parallelism each rank sees a part of the sequence. With this mark
        # finalize_model_grads sums the gradients over the ranks.
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Map [S, B, in] to [S, B, out], sharded like the input and the output of the layer itself."""
        return self.scale * self.linear_out(self.between(self.linear_in(x), group=self.group))


def _linear_of(weight: Tensor) -> torch.nn.Linear:
    """Make a linear layer with this weight."""
    # On the meta device the constructor draws no random numbers for the weight, which is replaced at once.
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight)
    return linear


class Adapters:
    """All adapters of this rank's part of the model."""

    def __init__(self, weights: HFWeights, settings: LoRASettings, seed: int) -> None:
        """Freeze the model and add adapters to its layers, with A drawn by Xavier's normal and B zero.

        Args:
            weights: Weights of this rank's part of the model.
            settings: Rank, scale and layers of the adapters.
            seed: Seed of A, which is the same at every layout.
        """
        self.weights = weights
        self.settings = settings
        self.active = True
        weights.model.requires_grad_(False)
        # The list is a copy, because the loop adds modules to the model.
        for name, layer in list(weights.model.named_modules()):
            if name.rpartition(".")[2] in settings.targets:
                layer.adapter = Adapter(layer, settings)
                if _is_fused_with_its_norm(layer):
                    layer.return_layernorm_output = True
                layer.register_forward_hook(self._add_output)
        if weights.model.config.recompute_granularity is not None and weights.model.pre_process:
            weights.model.embedding.register_forward_hook(_require_gradient)
        self._draw(seed)

    def _add_output(
        self, layer: Any, inputs: tuple[Tensor, ...], output: tuple[Any, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Add the adapter's output to the layer's output. This is the layer's forward hook."""
        result, bias = output
        if _is_fused_with_its_norm(layer):
            result, layer_input = result
        else:
            layer_input = inputs[0]
        if self.active:
            result = result + layer.adapter(layer_input)
        return result, bias

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draw every A as a whole from a generator of its own, and keep this rank's part.

        So the adapters are the same at every layout.
        """
        for name, parameter in self.local_parameters().items():
            if not name.endswith(_A):
                continue
            dim, _ = cut_of(name)
            num_parts = 1 if dim is None else parallel_state.get_tensor_model_parallel_world_size()
            # The name is hashed by CRC-32, because Python's hash of a string differs between processes.
            generator = torch.Generator().manual_seed((seed << 32) % 2**63 + zlib.crc32(name.encode()))
            whole = torch.empty(self.settings.dim, parameter.shape[1] * num_parts)
            torch.nn.init.xavier_normal_(whole, generator=generator)
            parameter.copy_(local_shard(name, whole))

    def local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's adapter parameters by name, with the layer's number in the whole model."""
        return {name: p for name, p in self.weights.local_parameters() if name.endswith((_A, _B))}

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch the adapters off within the block."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the whole merged weight W + (alpha / dim) B A, on every rank."""
        local = {name: p.detach() for name, p in self.weights.local_parameters()}
        yield from self.weights.family.to_hf(_Merged(self.weights.gather(local), self.settings.scale))

    def peft_tensors(self) -> dict[str, Tensor]:
        """Return the adapters of all Hugging Face matrices, with PEFT's names and shapes, on every rank.

        If megatron-core fuses several matrices into a layer, they share its A, and each has its rows of B.
        """
        whole = self.weights.gather({name: p.detach() for name, p in self.local_parameters().items()})
        family = self.weights.family
        tensors: dict[str, Tensor] = {}
        for unit in family.units():
            layer = unit.megatron.removesuffix(".weight")
            if layer + _B not in whole:
                continue
            rows_of_b = whole[layer + _B][unit.row : unit.row + unit.shape[0]]
            parts_of_b = unit.op.split(rows_of_b, [shape[0] for shape in unit.hf_shapes], family.dims)
            for name, part_of_b in zip(unit.hf, parts_of_b, strict=True):
                matrix = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{matrix}.lora_A.weight"] = whole[layer + _A]
                tensors[f"{matrix}.lora_B.weight"] = part_of_b
        return tensors

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe this rank's parts for megatron-core's checkpoints, which can be loaded at any layout."""
        num_layers = self.weights.family.num_layers
        return {name: _sharded(name, p, num_layers) for name, p in self.local_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors that `dist_checkpointing.load` has read into the adapters."""
        for name, parameter in self.local_parameters().items():
            parameter.copy_(state[name])


def _is_fused_with_its_norm(layer: torch.nn.Module) -> bool:
    """True for a layer of Transformer Engine that applies a norm to its input first."""
    return getattr(layer, "layer_norm_weight", None) is not None


def _require_gradient(_embedding: Any, _inputs: Any, output: Tensor) -> None:
    """Make the output of the frozen embedding require a gradient. This is the embedding's forward hook.

    megatron-core recomputes activations by torch's reentrant checkpointing, which computes no gradients in a
    block unless the block's input requires one (tests/unit/engine/test_upstream_faults.py).
    """
    output.requires_grad_()


class _Merged(Mapping[str, Tensor]):
    """The base model's whole tensors by name. A tensor is merged with its adapter when it is looked up."""

    def __init__(self, whole: Mapping[str, Tensor], scale: float) -> None:
        self.whole = whole
        self.scale = scale

    def __getitem__(self, name: str) -> Tensor:
        weight = self.whole[name]
        layer = name.removesuffix(".weight")
        if layer + _A not in self.whole:
            return weight
        a = self.whole[layer + _A]
        b = self.whole[layer + _B]
        # The sum is in float32, so that only its result is rounded.
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.whole if not name.endswith((_A, _B)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _sharded(name: str, parameter: torch.nn.Parameter, num_layers: int) -> Any:
    """Describe a parameter to megatron-core as a part of one tensor that stacks all layers.

    Its name in the checkpoint is therefore without the layer's number.
    """
    dim, num_blocks = cut_of(name)
    decoder, layers, number, *words = name.split(".")
    key = ".".join([decoder, layers, *words])
    offsets = ((0, int(number), num_layers),)
    if dim is None:
        return make_sharded_tensor_for_checkpoint(parameter, key, prepend_offsets=offsets)
    tensor = make_tp_sharded_tensor_for_checkpoint(parameter, key, tp_axis=dim, prepend_offsets=offsets)
    # Gate and up rows are cut separately, so a rank's rows are two blocks of the whole tensor.
    return apply_swiglu_sharded_factory(tensor, offsets) if num_blocks == 2 else tensor
