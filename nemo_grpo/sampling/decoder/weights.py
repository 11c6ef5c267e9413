"""The decoder's weights: fused for the forward pass, reachable under their Hugging Face names.

Sampling multiplies few rows at a time, so a product spends its time on reading the weights. On a CPU torch
would also convert their layout for every product. With oneDNN the weights are packed once per update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_grpo.models import COMPUTED, family_for, read_spec
from nemo_grpo.sampling.decoder import rotary
from nemo_grpo.support import machine
from nemo_grpo.support.errors import UserError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

MIN_PACKED_VALUES = 2**18
"""Values of a weight from which packing pays; oneDNN takes longer to start a product."""


def packs(weight: Tensor) -> bool:
    """Return True if products with this weight are faster when it is packed."""
    if weight.device.type != "cpu" or weight.numel() < MIN_PACKED_VALUES:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        # BF16 products are slow on a CPU without instructions for them.
        if not machine.has_bf16():
            return False
    elif weight.dtype != torch.float32:
        return False
    # The model of the processor decides, not a measurement, because a resumed run must compute the same bits.
    return machine.packs_weights()


class Matrix:
    """The map x -> x W^T + b, with W [out, in], and b [out] or None, in memory that `Weights` owns.

    Packing releases W's original memory, unless it is ``shared`` with something that reads W too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self._shared = shared
        self._num_bytes = weight.untyped_storage().nbytes()
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Pack the current W, if `packs` says so."""
        if not packs(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if not self._shared:
            self.weight.untyped_storage().resize_(0)

    def unpack(self) -> None:
        """Allocate W's memory again for writing. Its content is undefined."""
        self._packed = None
        self.weight.untyped_storage().resize_(self._num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [N, in] to [N, out]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [N, out] + x W^T for x [N, in]. The matrix must not have a bias."""
        if self._packed is None:
            return torch.addmm(residual, x, self.weight.T)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, None, "add")


@dataclass(frozen=True)
class Layer:
    """One layer; H query heads and G key-value heads of size D, width h, MLP width f.

    Attributes:
        qkv: [(H + 2G) D, h], queries, keys and values one below the other.
        query_norm: [D], or None.
        key_norm: [D], or None.
        output: [h, H D].
        gate_up: [2f, h].
        down: [h, f].
        input_norm: [h].
        mlp_norm: [h].
    """

    qkv: Matrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Tensor
    mlp_norm: Tensor


class Weights:
    """Uninitialised storage for a model of this configuration.

    Attributes:
        named: Hugging Face name -> tensor, which is a view into a fused one. Write it only within `writable`.
            Tied weights are one tensor under two names.
        layers: fused weights of each layer.
        embedding: [V, h].
        head: maps hidden states to logits.
        norm: [h], weight of the last norm.
        spec: sizes and options of the model.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights of a transformers config for which `unsupported` is None."""
        family = family_for(config.to_dict())
        self.spec = family.spec
        self._shapes = family.hf_shapes
        # This empty tensor carries dtype and device for `new_empty`.
        self._template = torch.empty(0, dtype=dtype, device=device)
        self.named: dict[str, Tensor] = {}
        self.embedding = self._allocate(EMBEDDING)
        self.norm = self._allocate(NORM)
        if family.tied:
            self.named[HEAD] = self.embedding
            # Shared: with tied weights the embedding looks up rows in it, so packing must keep the memory.
            self.head = Matrix(self.embedding, shared=True)
        else:
            self.head = Matrix(self._allocate(HEAD))
        self.layers = [self._layer(f"model.layers.{number}.") for number in range(family.num_layers)]

    def _layer(self, prefix: str) -> Layer:
        bias = None
        if self.spec.has_qkv_bias:
            bias = self._allocate_fused([f"{prefix}{name}.bias" for name in QKV])
        query_norm = None
        key_norm = None
        if self.spec.has_qk_norm:
            query_norm = self._allocate(f"{prefix}self_attn.q_norm.weight")
            key_norm = self._allocate(f"{prefix}self_attn.k_norm.weight")
        return Layer(
            qkv=Matrix(self._allocate_fused([f"{prefix}{name}.weight" for name in QKV]), bias),
            query_norm=query_norm,
            key_norm=key_norm,
            output=Matrix(self._allocate(f"{prefix}self_attn.o_proj.weight")),
            gate_up=Matrix(self._allocate_fused([f"{prefix}{name}.weight" for name in GATE_UP])),
            down=Matrix(self._allocate(f"{prefix}mlp.down_proj.weight")),
            input_norm=self._allocate(f"{prefix}input_layernorm.weight"),
            mlp_norm=self._allocate(f"{prefix}post_attention_layernorm.weight"),
        )

    @contextmanager
    def writable(self) -> Iterator[dict[str, Tensor]]:
        """Yield ``named`` for writing. The block must write every tensor."""
        for matrix in self._matrices():
            matrix.unpack()
        yield self.named
        # After an error nothing is packed: weights may be unwritten, and `LocalGenerator` refuses to sample.
        for matrix in self._matrices():
            matrix.pack()

    def _matrices(self) -> Iterator[Matrix]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def _allocate(self, name: str) -> Tensor:
        self.named[name] = self._template.new_empty(self._shapes[name])
        return self.named[name]

    def _allocate_fused(self, names: list[str]) -> Tensor:
        """Allocate one tensor with these weights stacked by rows. Each name gets a view into it."""
        shapes = [self._shapes[name] for name in names]
        num_rows = [shape[0] for shape in shapes]
        fused = self._template.new_empty((sum(num_rows), *shapes[0][1:]))
        self.named |= zip(names, fused.split(num_rows), strict=True)
        return fused


def unsupported(config: Any) -> str | None:
    """Explain why the decoder cannot compute a transformers model of this configuration, or return None."""
    content = config.to_dict()
    try:
        spec = read_spec(content, among=COMPUTED)
    except UserError as error:
        return str(error)
    if spec.hidden_act != "silu":
        return f"hidden_act={spec.hidden_act}"
    if content.get("quantization_config"):
        return "its weights are quantized"
    if spec.sliding_window:
        return f"sliding_window={spec.sliding_window}"
    return rotary.unsupported(config)


def missing_weights(config: Any, names: set[str]) -> list[str]:
    """List the model's tensors that a checkpoint with these names lacks."""
    family = family_for(config.to_dict())
    present = set(names)
    if family.tied and HEAD in names:
        present.add(EMBEDDING)  # tied weights: a checkpoint may have the tensor under either name
    return sorted(family.hf_shapes.keys() - present)
