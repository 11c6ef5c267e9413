"""The ways in which Hugging Face tensors become one Megatron tensor.

`Op` moves blocks of rows (axis 0), so one definition serves weights, biases and the B matrices of LoRA;
tensors in memory, and files of which only a few rows are read at a time. The others need their tensors whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nemo_grpo.core.lazy import Tensor, torch

Dims = Mapping[str, int]
"""Sizes of one model by their letters; `families.family` lists the letters."""


@dataclass(frozen=True)
class Rows:
    """A block of rows. Attributes: part: number of the Hugging Face tensor.  first, count: rows of it."""

    part: int
    first: int
    count: int


@dataclass(frozen=True)
class Op:
    """The parts [rows_k, ...] take turns in the whole [sum of rows_k, ...], an equal share of each per turn.

    Attributes: turns: letter of how often; None for once, the parts one below the other.
    """

    turns: str | None = None
    moves_rows: ClassVar[bool] = True
    """False: the tensors are read whole, and `blocks` is of no use."""

    def megatron_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The whole's shape, from the parts'."""
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    @property
    def contiguous(self) -> bool:
        """True if every part lies in the whole as one block of rows, in the order of the parts."""
        return self.turns is None

    def blocks(self, rows: Sequence[int], dims: Dims, most: int | None = None) -> Iterator[Rows]:
        """The parts' rows in their order in the whole.

        Args: rows: of each part.  most: rows of one block; None does not divide them.
        """
        turns = dims[self.turns] if self.turns else 1
        for turn in range(turns):
            for part, total in enumerate(rows):
                first, end = turn * total // turns, (turn + 1) * total // turns
                step = most or max(end - first, 1)
                yield from (Rows(part, row, min(step, end - row)) for row in range(first, end, step))

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """[rows_k, ...] each -> [sum of rows_k, ...]; shares memory with a single part."""
        blocks = self.blocks([part.shape[0] for part in parts], dims)
        pieces = [parts[rows.part][rows.first : rows.first + rows.count] for rows in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(pieces)

    def split(self, whole: Tensor, rows: Sequence[int], dims: Dims) -> list[Tensor]:
        """[sum of rows_k, ...] -> [rows_k, ...] each; views where a part is one block."""
        pieces: list[list[Tensor]] = [[] for _ in rows]
        row = 0
        for block in self.blocks(rows, dims):
            pieces[block.part].append(whole[row : row + block.count])
            row += block.count
        return [found[0] if len(found) == 1 else torch.cat(found) for found in pieces]


ONE_BELOW_THE_OTHER = Op()
"""A plain copy for one part, [gate; up] for two."""

GROUPED_QKV = Op("groups")
"""Queries, keys and values of one attention: per group of heads its queries, its key, its value.

With G groups, R = heads / G and head size D the Megatron rows are [G, R D + D + D], flattened.
"""


@dataclass(frozen=True)
class Transposed(Op):
    """[in, out] -> [out, in]. Attributes: takes_turns: columns gate, up, gate, up, ... become [gate; up]."""

    takes_turns: bool = False
    moves_rows: ClassVar[bool] = False

    @property
    def contiguous(self) -> bool:
        """One part."""
        return False

    def megatron_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The one part's axes in reverse."""
        return shapes[0][::-1]

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """One tensor, [in, out] or a bias [out] -> [out, in] or [out]."""
        whole = parts[0].t()
        return torch.cat([whole[::2], whole[1::2]]) if self.takes_turns else whole

    def split(self, whole: Tensor, rows: Sequence[int], dims: Dims) -> list[Tensor]:
        """The inverse of `join`."""
        parts = torch.stack(whole.chunk(2), 1).flatten(0, 1) if self.takes_turns else whole
        return [parts.t().contiguous()]


TRANSPOSED = Transposed()
GATE_UP_IN_TURNS = Transposed(takes_turns=True)
"""gpt-oss: the columns of [h, 2 f] belong to the gate and to the other factor in turns; biases alike."""
