"""The few ways in which Hugging Face tensors become one Megatron tensor, each with its inverse.

All of them act on the rows (axis 0), so one definition serves weights, biases and the B matrices of LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Dims = Mapping[str, int]
"""Sizes of one model by their letters; `families.family` lists the letters."""


class Op(Protocol):
    """Joins the parts [rows_k, ...] of one tensor into [sum of rows_k, ...], and takes them apart again."""

    @property
    def contiguous(self) -> bool:
        """True if every part lies in the whole as one block of rows, in the order of the parts."""
        ...

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """The whole; may share memory with the parts."""
        ...

    def split(self, whole: Tensor, dims: Dims) -> list[Tensor]:
        """The parts; may share memory with the whole."""
        ...


@dataclass(frozen=True)
class Rows:
    """Parts one below the other: a plain copy for one part, [gate; up] for two."""

    num_parts: int = 1
    contiguous: bool = True

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """[rows, ...] each -> [num_parts x rows, ...]."""
        return parts[0] if self.num_parts == 1 else torch.cat(list(parts))

    def split(self, whole: Tensor, dims: Dims) -> list[Tensor]:
        """[num_parts x rows, ...] -> num_parts views."""
        return list(whole.chunk(self.num_parts))


@dataclass(frozen=True)
class GroupedQKV:
    """Queries, keys and values of one attention: per group of heads its queries, its key, its value.

    With G groups, R = heads / G and head size D the Megatron rows are [G, R D + D + D], flattened.
    """

    contiguous: bool = False

    def join(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """[G R D, ...], [G D, ...], [G D, ...] -> [G (R + 2) D, ...]."""
        grouped = [part.unflatten(0, (dims["groups"], -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: Tensor, dims: Dims) -> list[Tensor]:
        """[G (R + 2) D, ...] -> queries, keys, values."""
        queries = dims["q"] // dims["groups"]
        grouped = whole.unflatten(0, (dims["groups"], -1))
        return [part.flatten(0, 1) for part in grouped.split([queries, dims["d"], dims["d"]], dim=1)]
