"""The decoder's forward pass: pre-norm attention with rotary positions, then a gated MLP, per layer."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_grpo.sampling.decoder.cache import KVCache
from nemo_grpo.sampling.decoder.prompts import PromptStream, prompt_streams
from nemo_grpo.sampling.decoder.rotary import RotaryTable, rotate
from nemo_grpo.sampling.decoder.weights import Layer, Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, H, D], keys [N, G, D], values [N, G, D]) -> [N, H D]."""


class Decoder:
    """A dense decoder. `Weights.named` takes its weights."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = Weights(config, dtype, device)
        self.device = device
        self._place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._rotary = RotaryTable(config, dtype, device)
        spec = self.weights.spec
        self._eps = spec.norm_eps
        self._head_size = spec.head_dim
        self._heads = spec.num_attention_heads
        self._groups = spec.num_key_value_heads

    def read(self, prompts: Sequence[list[int]], prompt_of_row: Tensor, room: int) -> tuple[Tensor, KVCache]:
        """Read the prompts into a new cache. A prompt is read once, even if many rows begin with it.

        Args:
            prompts: tokens of each prompt.
            prompt_of_row: [R], number of the prompt that each row begins with.
            room: largest number of new tokens per row.

        Returns:
            Logits [R, V] of each row's first new token, and the rows' cache.
        """
        cache = self._cache(prompts, prompt_of_row, room)
        # Only the last token of a prompt needs logits; for all tokens they would be the largest tensor.
        logits = torch.empty(len(prompts), len(self.weights.embedding), **self._place)
        for stream, hidden in self._read(prompts, prompt_of_row, cache):
            logits[stream.prompts] = self._logits(hidden[stream.ends])
        return logits[prompt_of_row.to(self.device)], cache

    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """Compute [B, S, V] of whole sequences, right-padded with 0."""
        rows = torch.arange(len(sequences))
        longest = max(map(len, sequences))
        logits = torch.zeros(len(sequences), longest, len(self.weights.embedding), **self._place)
        cache = self._cache(sequences, rows, 0)
        for stream, hidden in self._read(sequences, rows, cache):
            logits[stream.prompt_of_token, stream.positions] = self._logits(hidden)
        return logits

    def _cache(self, prompts: Sequence[list[int]], prompt_of_row: Tensor, room: int) -> KVCache:
        lengths = torch.tensor([len(prompt) for prompt in prompts])[prompt_of_row]
        shape = (len(self.weights.layers), self._groups, self._head_size)
        return KVCache(shape, lengths.to(self.device), room, self._place)

    def _read(
        self, prompts: Sequence[list[int]], prompt_of_row: Tensor, cache: KVCache
    ) -> Iterator[tuple[PromptStream, Tensor]]:
        """Yield streams of prompts with their hidden states [N, h], and fill the cache."""
        for stream in prompt_streams(prompts, prompt_of_row, self.device):
            rotations = self._rotary.upto(cache.columns)[stream.positions]
            attend = partial(cache.attend_prompts, stream.runs)
            yield stream, self._hidden_states(stream.tokens, rotations, attend)

    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Feed every row of the cache one token [R]; returns logits [R, V] of the next."""
        cache.add_column()
        table = self._rotary.upto(cache.columns)
        positions = cache.positions
        if isinstance(positions, Tensor):
            rotations = table[positions]
        else:
            rotations = table[positions : positions + 1]  # one rotation for all rows
        return self._logits(self._hidden_states(tokens, rotations, cache.attend_step))

    def _hidden_states(self, tokens: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Compute the hidden states [N, h] of N tokens after the last layer; ``attend`` has their context."""
        hidden = F.embedding(tokens, self.weights.embedding)
        for number, layer in enumerate(self.weights.layers):
            queries, keys, values = self._project(layer, hidden, rotations)
            hidden = layer.output.plus(hidden, attend(number, queries, keys, values))
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, -1)
            # In place, because nothing else reads the output of the activation.
            hidden = layer.down.plus(hidden, F.silu(gate).mul_(up))
        return hidden

    def _project(self, layer: Layer, hidden: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute [N, H, D] queries, [N, G, D] keys and values; queries and keys are rotated."""
        fused = layer.qkv(self._normed(hidden, layer.input_norm))
        heads = fused.view(len(fused), -1, self._head_size)
        # Queries and keys stay in one tensor, so that one operation rotates both.
        queries_keys, values = heads.split([self._heads + self._groups, self._groups], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = queries_keys.split([self._heads, self._groups], 1)
            normed_queries = self._normed(queries, layer.query_norm)
            normed_keys = self._normed(keys, layer.key_norm)
            queries_keys = torch.cat([normed_queries, normed_keys], 1)
        queries, keys = rotate(queries_keys, rotations).split([self._heads, self._groups], 1)
        return queries, keys, values

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values, weight.shape, weight, self._eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.weights.head(self._normed(hidden, self.weights.norm))
