"""Sampling with the decoder of this package, which knows the model families that the engine trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_grpo.sampling.decoder.cache import KVCache
from nemo_grpo.sampling.decoder.model import Decoder
from nemo_grpo.sampling.decoder.weights import unsupported
from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import load_config, stream_weights


class DecoderGenerator(LocalGenerator):
    """A `LocalGenerator` for models for which `decoder.weights.unsupported` is None."""

    name = "decoder"

    def _build(self, model: Path | PretrainedConfig, dtype: torch.dtype) -> None:
        self._config = load_config(model) if isinstance(model, Path) else model
        assert unsupported(self._config) is None, unsupported(self._config)
        self.decoder = Decoder(self._config, dtype, self.device)
        if isinstance(model, Path):
            self._load(model)

    def _load(self, folder: Path) -> None:
        expected = self.decoder.weights.named
        # Tensors that the model does not have are ignored, as transformers does.
        weights = ((name, tensor) for name, tensor in stream_weights(folder) if name in expected)
        try:
            self.update_weights(weights)
        except ValueError as error:
            raise UserError(f"cannot load a causal language model from {folder}: {error}") from None

    @torch.no_grad()
    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        return self.decoder.logits(sequences)

    def _writable(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        return self.decoder.weights.writable()

    def _read(self, prompts: list[list[int]], prompt_of_row: Tensor, room: int) -> _Decoding:
        logits, cache = self.decoder.read(prompts, prompt_of_row, room)
        return _Decoding(self.decoder, logits, cache)


class _Decoding:
    """See `local_generator.Decoding`."""

    def __init__(self, decoder: Decoder, logits: Tensor, cache: KVCache) -> None:
        self.logits = logits
        self._decoder = decoder
        self._cache = cache

    def keep(self, going: Tensor) -> Tensor:
        # The logits keep their finished rows, because the next step replaces them all.
        return self._cache.keep(going)

    def advance(self, tokens: Tensor) -> None:
        self.logits = self._decoder.step(tokens, self._cache)
