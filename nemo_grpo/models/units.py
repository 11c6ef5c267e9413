"""Parts of a model that convert by themselves, and their places in torch_dist checkpoints."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_grpo.models.ops import Dims, Op, Rows


@dataclass(frozen=True)
class Storage:
    """Places of a Megatron tensor in torch_dist checkpoints.

    megatron-core stacks tensors of one kind under one key: always the experts of a layer, and the layers of a
    model whose layers are all alike. Other writers stack nothing, so a reader looks under several keys.

    Attributes:
        key: the key that our converter writes.
        index: the tensor's position on the stacked axes of the key, layer before expert.
        stack: lengths of these axes.
        twins: further keys that our converter writes with the same content.
        stacked_keys: all keys under which a checkpoint may have the tensor stacked, ``key`` first.
        unstacked_keys: keys under which a checkpoint that stacks nothing may have it.
    """

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    twins: tuple[str, ...]
    stacked_keys: tuple[str, ...]
    unstacked_keys: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """The smallest part of a model that converts by itself: a block of rows of one Megatron tensor.

    The gate and the up projection, for example, are two units of one tensor, because each is a block of its
    rows. Queries, keys and values are interleaved, so their tensor is one unit.

    Attributes:
        megatron: name of the Megatron tensor, with the numbers of layer and expert filled in.
        storage: places of the Megatron tensor in checkpoints.
        tensor_rows: number of rows of the Megatron tensor.
        row: first row of the Megatron tensor that belongs to the unit.
        shape: shape of the unit.
        hf: names of the Hugging Face tensors that make up the unit, in the op's order.
        hf_shapes: shapes of these Hugging Face tensors.
        op: operation that joins the Hugging Face tensors to the unit.
        padded: the rows are the vocabulary, which Megatron may pad.
        keeps_dtype: the unit keeps its dtype, whatever ``--dtype`` says.
    """

    megatron: str
    storage: Storage
    tensor_rows: int
    row: int
    shape: tuple[int, ...]
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    op: Op
    padded: bool
    keeps_dtype: bool

    def pieces(self, dims: Dims, num_values: int) -> Iterator[Rows]:
        """Yield the unit's rows in Megatron's order, as blocks of at most ``num_values`` numbers."""
        max_rows = max(1, num_values // math.prod(self.shape[1:]))
        return self.op.blocks([shape[0] for shape in self.hf_shapes], dims, max_rows)
