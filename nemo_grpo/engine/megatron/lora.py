"""LoRA (Hu et al. 2021) on megatron-core's parallel linear layers: y = W x + alpha / dim B A x, W frozen.

How A [dim, in] and B [out, dim] are cut over the tensor-parallel ranks, and what happens between them:

    layer             W cut along   A                 B                  with sequence parallelism
    qkv, fc1 (column) the output    on every rank     cut as W           B's input is gathered
    proj, fc2 (row)   the input     cut as W          on every rank      A's partial sums are scattered

Only the ``dim`` wide activation between A and B is communicated. An adapter is a submodule of its layer, so W
keeps its name; a forward hook adds the adapter's output to the layer's. Transformer Engine's layers that are
fused with the norm before them return its output, for the hook, too. Names, shapes and checkpoint keys are
Megatron-Bridge's: ``<layer>.adapter.linear_in.weight`` is A, ``<layer>.adapter.linear_out.weight`` is B.
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

# (column parallel, sequence parallel) -> communication of A's output between the ranks. The backward of each
# completes the gradient that reaches A: a sum over the ranks for column layers, nothing or a gather for row
# layers.
_BETWEEN = {
    (True, False): copy_to_tensor_model_parallel_region,
    (True, True): gather_from_sequence_parallel_region,
    (False, False): reduce_from_tensor_model_parallel_region,
    (False, True): reduce_scatter_to_sequence_parallel_region,
}


@dataclass(frozen=True)
class LoRASettings:
    """Rank, scale and place of the adapters.

    Attributes:
        dim: rank.
        alpha: B A is multiplied by alpha / dim.
        targets: some of `LORA_LAYERS`.
    """

    dim: int
    alpha: int
    targets: tuple[str, ...] = LORA_LAYERS

    @property
    def scale(self) -> float:
        return self.alpha / self.dim


class Adapter(torch.nn.Module):
    """x -> alpha / dim B A x beside one parallel linear layer; this rank's part of A and B.

    The layer has ``sequence_parallel``, ``tp_group``, and ``weight`` with megatron-core's ``partition_dim``.
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
        # This rank saw its share of the sequence; finalize_model_grads adds the other ranks' gradients.
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Map [S, B, in] to [S, B, out], in the shards that the layer itself takes and gives."""
        return self.scale * self.linear_out(self.between(self.linear_in(x), group=self.group))


def _linear_of(weight: Tensor) -> torch.nn.Linear:
    """Make a linear layer with this weight."""
    # On meta, because its constructor would draw random numbers for a weight that is replaced.
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight)
    return linear


class Adapters:
    """All adapters of this rank's part of the model."""

    def __init__(self, weights: HFWeights, settings: LoRASettings, seed: int) -> None:
        """Freeze the model and give its layers adapters: A Xavier normal, alike at every layout; B zero."""
        self.weights = weights
        self.settings = settings
        self.active = True
        weights.model.requires_grad_(False)
        # A list, because the loop adds modules.
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
        """Add the adapter's output to the layer's; a forward hook."""
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
        """Draw each whole A from its own generator, whatever the layout, and keep this rank's part."""
        for name, parameter in self.local_parameters().items():
            if not name.endswith(_A):
                continue
            dim, _ = cut_of(name)
            num_parts = 1 if dim is None else parallel_state.get_tensor_model_parallel_world_size()
            # Python's hash of a string differs between processes, CRC-32 does not.
            generator = torch.Generator().manual_seed((seed << 32) % 2**63 + zlib.crc32(name.encode()))
            whole = torch.empty(self.settings.dim, parameter.shape[1] * num_parts)
            torch.nn.init.xavier_normal_(whole, generator=generator)
            parameter.copy_(local_shard(name, whole))

    def local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's adapter parameters by name, layers numbered in the whole model."""
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
        """Yield (Hugging Face name, tensor) of every weight W + alpha / dim B A, whole, on every rank."""
        local = {name: p.detach() for name, p in self.weights.local_parameters()}
        yield from self.weights.family.to_hf(_Merged(self.weights.gather(local), self.settings.scale))

    def peft_tensors(self) -> dict[str, Tensor]:
        """Return the adapters under PEFT's names and shapes, per Hugging Face matrix, on every rank.

        Matrices that megatron-core fuses share one A, and each has rows of B.
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
        """Return this rank's parts for `megatron.core.dist_checkpointing`, at any layout."""
        num_layers = self.weights.family.num_layers
        return {name: _sharded(name, p, num_layers) for name, p in self.local_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `dist_checkpointing.load` filled in."""
        for name, parameter in self.local_parameters().items():
            parameter.copy_(state[name])


def _is_fused_with_its_norm(layer: torch.nn.Module) -> bool:
    """True for Transformer Engine's layers where W multiplies the norm of the input."""
    return getattr(layer, "layer_norm_weight", None) is not None


def _require_gradient(_embedding: Any, _inputs: Any, output: Tensor) -> None:
    """Make the model's input require a gradient; a forward hook of the embedding.

    torch's reentrant checkpointing, which megatron-core uses, gives a block no gradients at all unless its
    input requires one (tests/unit/engine/test_upstream_faults.py).
    """
    output.requires_grad_()


class _Merged(Mapping[str, Tensor]):
    """The base's whole tensors by name, each merged with its adapter when it is asked for."""

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
        # In float32, and rounded once.
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.whole if not name.endswith((_A, _B)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _sharded(name: str, parameter: torch.nn.Parameter, num_layers: int) -> Any:
    """Describe a parameter as a part of one tensor that stacks all layers.

    Its name in the checkpoint lacks the layer's number.
    """
    dim, num_blocks = cut_of(name)
    decoder, layers, number, *words = name.split(".")
    key = ".".join([decoder, layers, *words])
    offsets = ((0, int(number), num_layers),)
    if dim is None:
        return make_sharded_tensor_for_checkpoint(parameter, key, prepend_offsets=offsets)
    tensor = make_tp_sharded_tensor_for_checkpoint(parameter, key, tp_axis=dim, prepend_offsets=offsets)
    # Gate and up rows are cut by themselves, so a rank's rows are not one block of the whole.
    return apply_swiglu_sharded_factory(tensor, offsets) if num_blocks == 2 else tensor
