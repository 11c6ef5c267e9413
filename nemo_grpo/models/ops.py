"""Operations that make one Megatron tensor of Hugging Face tensors, and the way back.

`Op` moves blocks of rows (axis 0), so one definition serves weights, biases and LoRA's B matrices, in memory
and in files that are read a few rows at a time. The others need whole tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nemo_grpo.core.lazy import Tensor, torch

Dims = Mapping[str, int]
"""Sizes of one model by their letters; `models.family` lists the letters."""


@dataclass(frozen=True)
class Rows:
    """A block of rows of a Hugging Face tensor.

    Attributes:
        part: the tensor's number among those of the op.
        first: first row of the block in it.
        count: rows of the block.
    """

    part: int
    first: int
    count: int


@dataclass(frozen=True)
class Op:
    """Interleaves the rows of parts [rows_k, ...] to a whole [sum of rows_k, ...].

    In each turn every part gives an equal share of its rows. With one turn, each part follows the one before.

    Attributes: turns: letter of the number of turns in `Dims`; None: one turn.
    """

    turns: str | None = None
    moves_rows: ClassVar[bool] = True
    """False: tensors are read whole, not in `blocks`."""
    keeps_order: ClassVar[bool] = True
    """False: a part's rows change their order, so the whole must be read to split it."""
    computes: ClassVar[bool] = False
    """True: the numbers change, too. Megatron's tensor then has the next wider dtype, to lose no bits."""

    def megatron_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Compute the shape of the whole from the shapes of its parts."""
        num_rows = sum(shape[0] for shape in shapes)
        return (num_rows, *shapes[0][1:])

    @property
    def contiguous(self) -> bool:
        """True if every part lies in the whole as one block of rows, in the order of the parts."""
        return self.turns is None and self.keeps_order

    def blocks(self, rows: Sequence[int], dims: Dims, max_rows: int | None = None) -> Iterator[Rows]:
        """Yield the parts' rows in their order in the whole.

        Args:
            rows: number of rows of each part.
            dims: sizes by letter.
            max_rows: rows of the longest block; None: a part's share of a turn is one block.
        """
        num_turns = dims[self.turns] if self.turns else 1
        for turn in range(num_turns):
            for part, num_rows in enumerate(rows):
                first = turn * num_rows // num_turns
                end = (turn + 1) * num_rows // num_turns
                yield from _divided(part, first, end, max_rows)

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """Join parts [rows_k, ...] to the whole [sum of rows_k, ...]. A single part is returned as it is."""
        if len(parts) == 1:
            # No copy: most tensors only change their names.
            return parts[0]
        blocks = self.blocks([part.shape[0] for part in parts], dims)
        return torch.cat([parts[rows.part][rows.first : rows.first + rows.count] for rows in blocks])

    def split(self, whole: Tensor, rows: Sequence[int], dims: Dims) -> list[Tensor]:
        """Split a whole [sum of rows_k, ...] into its parts [rows_k, ...]; a part of one block is a view."""
        blocks_by_first_row: list[dict[int, Tensor]] = [{} for _ in rows]
        row = 0
        for block in self.blocks(rows, dims):
            blocks_by_first_row[block.part][block.first] = whole[row : row + block.count]
            row += block.count
        parts = []
        for blocks in blocks_by_first_row:
            # Sorted, because `GatedQKV` visits a part's rows in another order than that of the part.
            in_order = [blocks[first] for first in sorted(blocks)]
            parts.append(in_order[0] if len(in_order) == 1 else torch.cat(in_order))
        return parts


def _divided(part: int, first: int, end: int, max_rows: int | None) -> Iterator[Rows]:
    """Divide rows ``first`` to ``end`` of a part into blocks."""
    step = max_rows or max(end - first, 1)
    for row in range(first, end, step):
        yield Rows(part, row, min(step, end - row))


ONE_BELOW_THE_OTHER = Op()
"""A plain copy for one part, [gate; up] for two."""

GROUPED_QKV = Op("groups")
"""Queries, keys and values of one attention: per group of heads its queries, its key, its value.

With G groups, R = heads / G and head size D the Megatron rows are [G, R D + D + D], flattened.
"""


@dataclass(frozen=True)
class GatedQKV(Op):
    """`GROUPED_QKV` for queries with gates.

    In Hugging Face's queries each head is followed by its gate. Megatron has all queries of a group first and
    then all its gates: with R heads of size D in each of G groups its rows are [G, R D + R D + D + D],
    flattened.
    """

    keeps_order: ClassVar[bool] = False

    def blocks(self, rows: Sequence[int], dims: Dims, max_rows: int | None = None) -> Iterator[Rows]:
        num_groups = dims["groups"]
        width = dims["d"]
        heads_per_group = rows[0] // (2 * width * num_groups)
        for group in range(num_groups):
            heads = range(group * heads_per_group, (group + 1) * heads_per_group)
            for head in heads:
                first = 2 * head * width
                yield from _divided(0, first, first + width, max_rows)
            for head in heads:
                first_of_gate = (2 * head + 1) * width
                yield from _divided(0, first_of_gate, first_of_gate + width, max_rows)
            # One key head and one value head per group.
            for part in (1, 2):
                yield from _divided(part, group * width, (group + 1) * width, max_rows)


GATED_QKV = GatedQKV()


@dataclass(frozen=True)
class OneSubtracted(Op):
    """Turns the scale w of a norm into w - 1, which megatron-core stores for norms that add 1 themselves.

    Both directions compute in the next wider dtype, and Megatron's tensor is stored in it. In w's own dtype
    w - 1 would lose bits of every w below 0.5, which adding 1 does not bring back. Megatron-Bridge computes
    in the stored dtype.
    """

    moves_rows: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    computes: ClassVar[bool] = True

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        return _widened(parts[0]) - 1

    def split(self, whole: Tensor, rows: Sequence[int], dims: Dims) -> list[Tensor]:
        return [_widened(whole) + 1]


def _widened(tensor: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32, and others to float64."""
    return tensor.double() if tensor.dtype.itemsize > 2 else tensor.float()


ONE_SUBTRACTED = OneSubtracted()


@dataclass(frozen=True)
class Transposed(Op):
    """Transposes a matrix: [in, out] -> [out, in].

    Attributes: takes_turns: columns gate, up, gate, up, ... become the rows [gate; up].
    """

    takes_turns: bool = False
    moves_rows: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False

    def megatron_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0][::-1]

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        whole = parts[0].t()
        if not self.takes_turns:
            return whole
        gate = whole[::2]
        up = whole[1::2]
        return torch.cat([gate, up])

    def split(self, whole: Tensor, rows: Sequence[int], dims: Dims) -> list[Tensor]:
        if self.takes_turns:
            gate_and_up = whole.chunk(2)
            whole = torch.stack(gate_and_up, 1).flatten(0, 1)
        return [whole.t().contiguous()]


TRANSPOSED = Transposed()
GATE_UP_IN_TURNS = Transposed(takes_turns=True)
"""gpt-oss: in the columns of [h, 2 f], and in the biases, gate and up take turns."""
