"""Keys and values of unfinished responses, and attention over them.

Every response has one row per layer. Prompts end at the same column, so that every step writes one column of
all rows; shorter prompts leave columns on their left unused. When a response ends, the last unfinished row
takes its place: a row is copied, not the cache.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_grpo.sampling.decoder.prompts import PromptRun

MIN_ROOM = 64
"""Columns for new tokens at first; the cache then grows by half."""

MOST_CAST = 256
"""Most columns whose 16-bit keys and values attention casts to float32; at 500 the cast is slower."""


class KVCache:
    """Keys and values, each [rows, G, columns, D] per layer."""

    def __init__(
        self, shape: tuple[int, int, int], row_lengths: Tensor, room: int, place: dict[str, Any]
    ) -> None:
        """Allocate empty rows.

        Args: shape: layers, G, D.  row_lengths: [R], tokens of each row's prompt.  room: most new tokens.
              place: dtype and device.
        """
        num_layers, self._groups, self._head_size = shape
        self._place = place
        self.num_rows = len(row_lengths)
        self.columns = int(row_lengths.max())  # filled ones
        self._prompt_columns, self._last_column = self.columns, self.columns + room
        self._first = self.columns - row_lengths  # [rows], each one's first used column
        self._ragged = bool(self._first.any())
        self._bias: Tensor | None = None
        self._width = self.columns + min(room, MIN_ROOM)
        self._layers = [self._empty() for _ in range(num_layers)]
        self._set_bias()
        if self._ragged:  # what no token wrote must be finite: attention multiplies it by 0
            for held in chain.from_iterable(self._layers):
                held[:, :, : self.columns] = 0

    def _empty(self) -> tuple[Tensor, Tensor]:
        values = torch.empty(self.num_rows, self._groups, self._width, self._head_size, **self._place)
        if values.dtype != torch.float32:
            return torch.empty_like(values), values
        # `_attend`'s product is faster with each component's columns side by side
        return torch.empty_like(values.transpose(2, 3), memory_format=torch.contiguous_format).mT, values

    def _set_bias(self) -> None:
        """[rows, G, 1, columns], added to the scores: -inf in front of a row's prompt."""
        if self._ragged:
            columns = torch.arange(self._width, device=self._first.device)
            unused = (columns < self._first[:, None])[:, None, None]
            bias = torch.zeros(unused.shape, **self._place).masked_fill_(unused, -torch.inf)
            self._bias = bias.repeat(1, self._groups, 1, 1)

    @property
    def positions(self) -> Tensor | int:
        """Positions of the newest column's tokens: [R], or one number for all."""
        newest = self.columns - 1
        return newest - self._first[: self.num_rows] if self._ragged else newest

    def add_column(self) -> None:
        """Make room for one more token per row."""
        if self.columns == self._width:
            self._grow()
        self.columns += 1

    def _grow(self) -> None:
        self._width = min(self._last_column, self._width + self._width // 2 + 1)
        self._first = self._first[: self.num_rows]
        for number, pair in enumerate(self._layers):
            self._layers[number] = self._empty()
            for old, new in zip(pair, self._layers[number], strict=True):
                new[:, :, : self.columns] = old[: self.num_rows]
        self._set_bias()

    def keep(self, going: Tensor) -> Tensor:
        """Drop the rows that are False in going [R]; returns the rows' old numbers, in their new order."""
        order = going.nonzero()[:, 0]
        number = len(order)
        free, moved = (~going[:number]).nonzero()[:, 0], order[order >= number]
        order = torch.arange(number, device=going.device)
        order[free] = moved
        for held in chain.from_iterable(self._layers):
            filled = held[:, :, : self.columns]
            filled[free] = filled[moved]
        self._first[free] = self._first[moved]
        if self._bias is not None:
            self._bias[free] = self._bias[moved]
        self.num_rows = number
        return order

    def attend_step(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the newest column, and attend from it to all.

        Args:    queries: [R, H, D].  keys, values: [R, G, D].
        Returns: [R, H D].
        """
        rows, columns = slice(self.num_rows), slice(self.columns)
        held_keys, held_values = self._layers[layer]
        held_keys[rows, :, self.columns - 1] = keys
        held_values[rows, :, self.columns - 1] = values
        attended = _attend(
            # the queries of a group see the same keys: they go in as one head's queries
            queries.unflatten(1, (self._groups, -1)),
            held_keys[rows, :, columns],
            held_values[rows, :, columns],
            None if self._bias is None else self._bias[rows, :, :, columns],
        )
        return attended.reshape(len(queries), -1)

    def attend_prompts(
        self, runs: Sequence[PromptRun], layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write whole prompts into the rows that begin with them, and attend within each.

        Args:    queries: [N, H, D], a stream of tokens.  keys, values: [N, G, D].
        Returns: [N, H D].
        """
        attended = torch.empty_like(queries)
        held_keys, held_values = self._layers[layer]
        for run in runs:
            q, k, v = (
                x[run.tokens].view(run.number, run.length, -1, self._head_size).transpose(1, 2)
                for x in (queries, keys, values)
            )
            columns = slice(self._prompt_columns - run.length, self._prompt_columns)
            held_keys[run.rows, :, columns] = k[run.prompt_of_row]
            held_values[run.rows, :, columns] = v[run.prompt_of_row]
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended[run.tokens] = result.transpose(1, 2).flatten(0, 1)
        return attended.flatten(1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Compute scaled_dot_product_attention, in half its time for a few queries per head.

    Scores are at least float32. For that 16-bit keys and values are cast, unless they are many.

    Args:    queries: [R, G, q, D].  keys, values: [R, G, columns, D].  bias: [R, G, 1, columns].
    Returns: [R, G, q, D].
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    if queries.dtype != dtype and (queries.is_cuda or keys.shape[2] > MOST_CAST):
        return F.scaled_dot_product_attention(queries, keys, values, bias)
    q, k, v = (x.to(dtype).flatten(0, 1) for x in (queries, keys, values))
    scale = queries.shape[-1] ** -0.5
    if bias is None:
        scores = torch.bmm(q, k.mT).mul_(scale)
    else:
        scores = torch.baddbmm(bias.to(dtype).flatten(0, 1), q, k.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), v).to(queries.dtype).view_as(queries)
