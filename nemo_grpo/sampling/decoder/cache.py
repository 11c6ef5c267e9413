"""Keys and values of unfinished responses, and attention over them.

Every response has one row per layer. All prompts end at the same column, so that every step writes a single
column; shorter prompts leave columns on their left unused. When a response ends, the last unfinished row
moves into its row, so that only one row is copied and not the whole cache.
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

MAX_CAST_COLUMNS = 256
"""Up to this many columns attention casts 16-bit keys and values to float32; at 500 the cast is slower."""


class KVCache:
    """Keys and values, each [rows, G, columns, D] per layer."""

    def __init__(
        self, shape: tuple[int, int, int], row_lengths: Tensor, room: int, place: dict[str, Any]
    ) -> None:
        """Allocate empty rows.

        Args:
            shape: number of layers, G, D.
            row_lengths: [R], tokens of each row's prompt.
            room: largest number of new tokens.
            place: dtype and device.
        """
        num_layers, self._groups, self._head_size = shape
        self._place = place
        self.num_rows = len(row_lengths)
        # Number of columns that are filled.
        self.columns = int(row_lengths.max())
        self._prompt_columns = self.columns
        self._max_columns = self.columns + room
        # [rows], the first column that each row uses.
        self._first = self.columns - row_lengths
        self._is_ragged = bool(self._first.any())
        self._bias: Tensor | None = None
        # Number of columns that are allocated. Few responses reach the limit, so the cache begins small.
        self._width = self.columns + min(room, MIN_ROOM)
        self._layers = [self._empty_layer() for _ in range(num_layers)]
        self._set_bias()
        if self._is_ragged:
            # The columns in front of a prompt must be finite: attention multiplies them by 0, and 0 times the
            # NaN that fresh memory may hold is NaN.
            for tensor in chain.from_iterable(self._layers):
                tensor[:, :, : self.columns] = 0

    def _empty_layer(self) -> tuple[Tensor, Tensor]:
        """Allocate keys and values of a layer, each [rows, G, columns, D]."""
        values = torch.empty(self.num_rows, self._groups, self._width, self._head_size, **self._place)
        if values.dtype != torch.float32:
            return torch.empty_like(values), values
        # Keys are stored transposed, with columns adjacent in memory: the product in `_attend` is faster so.
        keys = torch.empty_like(values.transpose(2, 3), memory_format=torch.contiguous_format).mT
        return keys, values

    def _set_bias(self) -> None:
        """Set the bias of the scores, [rows, G, 1, columns]: -inf in front of a row's prompt."""
        if not self._is_ragged:
            return
        columns = torch.arange(self._width, device=self._first.device)
        unused = (columns < self._first[:, None])[:, None, None]
        bias = torch.zeros(unused.shape, **self._place).masked_fill_(unused, -torch.inf)
        self._bias = bias.repeat(1, self._groups, 1, 1)

    @property
    def positions(self) -> Tensor | int:
        """Position of each row's newest token, [R]; a single number if it is the same for all rows."""
        newest = self.columns - 1
        if self._is_ragged:
            return newest - self._first[: self.num_rows]
        return newest

    def add_column(self) -> None:
        """Make room for one more token per row."""
        if self.columns == self._width:
            self._grow()
        self.columns += 1

    def _grow(self) -> None:
        """Make the cache half as wide again, for the unfinished rows only."""
        self._width = min(self._max_columns, self._width + self._width // 2 + 1)
        self._first = self._first[: self.num_rows]
        # Layer by layer, so that only one layer is in memory twice.
        for number, old_layer in enumerate(self._layers):
            self._layers[number] = self._empty_layer()
            for old, new in zip(old_layer, self._layers[number], strict=True):
                new[:, :, : self.columns] = old[: self.num_rows]
        self._set_bias()

    def keep(self, going: Tensor) -> Tensor:
        """Drop the rows that are False in going [R]; returns the rows' old numbers, in their new order."""
        remaining = going.nonzero()[:, 0]
        num_remaining = len(remaining)
        # The first num_remaining rows stay in use. Unfinished rows behind them move into finished ones.
        free = (~going[:num_remaining]).nonzero()[:, 0]
        moved = remaining[remaining >= num_remaining]
        order = torch.arange(num_remaining, device=going.device)
        order[free] = moved
        for tensor in chain.from_iterable(self._layers):
            filled = tensor[:, :, : self.columns]
            filled[free] = filled[moved]
        self._first[free] = self._first[moved]
        if self._bias is not None:
            self._bias[free] = self._bias[moved]
        self.num_rows = num_remaining
        return order

    def attend_step(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the keys and values of the newest column, and attend from it to all columns so far.

        Args:
            layer: number of the layer.
            queries: [R, H, D].
            keys: [R, G, D].
            values: [R, G, D].

        Returns:
            [R, H D].
        """
        rows = slice(self.num_rows)
        columns = slice(self.columns)
        cached_keys, cached_values = self._layers[layer]
        cached_keys[rows, :, self.columns - 1] = keys
        cached_values[rows, :, self.columns - 1] = values
        bias = None if self._bias is None else self._bias[rows, :, :, columns]
        # All query heads of a group attend to the same keys, so they are passed as queries of one head.
        grouped_queries = queries.unflatten(1, (self._groups, -1))
        attended = _attend(
            grouped_queries, cached_keys[rows, :, columns], cached_values[rows, :, columns], bias
        )
        return attended.reshape(len(queries), -1)

    def attend_prompts(
        self, runs: Sequence[PromptRun], layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write whole prompts into the rows that begin with them, and attend within each.

        Args:
            runs: the stream's prompts, by length.
            layer: number of the layer.
            queries: [N, H, D], for the N tokens of a stream.
            keys: [N, G, D].
            values: [N, G, D].

        Returns:
            [N, H D].
        """
        attended = torch.empty_like(queries)
        cached_keys, cached_values = self._layers[layer]
        # Prompts of equal length form a batch without padding. It needs no mask, so that torch can take its
        # faster causal kernel.
        for run in runs:
            q = self._by_prompt(queries, run)
            k = self._by_prompt(keys, run)
            v = self._by_prompt(values, run)
            # All prompts end at the same column.
            columns = slice(self._prompt_columns - run.length, self._prompt_columns)
            cached_keys[run.rows, :, columns] = k[run.prompt_of_row]
            cached_values[run.rows, :, columns] = v[run.prompt_of_row]
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended[run.tokens] = result.transpose(1, 2).flatten(0, 1)
        return attended.flatten(1)

    def _by_prompt(self, stream: Tensor, run: PromptRun) -> Tensor:
        """Cut a run of prompts out of a stream [N, heads, D]. Returns [prompts, heads, length, D]."""
        return stream[run.tokens].view(run.number, run.length, -1, self._head_size).transpose(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Compute what scaled_dot_product_attention does; with few queries per head it takes half the time.

    Args:
        queries: [R, G, q, D].
        keys: [R, G, columns, D].
        values: [R, G, columns, D].
        bias: [R, G, 1, columns], added to the scores.

    Returns:
        [R, G, q, D].
    """
    # Scores are computed in float32 or more, so 16-bit keys and values must be cast. If there are many of
    # them, the cast costs more than it saves, and on a GPU torch's own kernel is faster anyway.
    dtype = torch.promote_types(queries.dtype, torch.float32)
    needs_cast = queries.dtype != dtype
    if needs_cast and (queries.is_cuda or keys.shape[2] > MAX_CAST_COLUMNS):
        return F.scaled_dot_product_attention(queries, keys, values, bias)
    q = queries.to(dtype).flatten(0, 1)
    k = keys.to(dtype).flatten(0, 1)
    v = values.to(dtype).flatten(0, 1)
    scale = queries.shape[-1] ** -0.5
    if bias is None:
        scores = torch.bmm(q, k.mT).mul_(scale)
    else:
        scores = torch.baddbmm(bias.to(dtype).flatten(0, 1), q, k.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), v).to(queries.dtype).view_as(queries)
