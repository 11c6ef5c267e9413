"""Sampling with the engine's own decoder, which knows the families that the engine trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_grpo.engine.decoder.cache import KVCache
from nemo_grpo.engine.decoder.model import Decoder
from nemo_grpo.engine.decoder.weights import unsupported
from nemo_grpo.engine.hf_folder import load_config, stream_weights
from nemo_grpo.engine.local_generator import LocalGenerator
from nemo_grpo.errors import UserError


class DecoderGenerator(LocalGenerator):
    """A `Generator` on one device, for models for which `decoder.weights.unsupported` is None.

    Args:
        model: a folder with config and safetensors, or a configuration; then `update_weights` comes first.
        dtype: of weights and cache; logprobs are computed in float32 whatever it is.
        max_batch_size: responses that are sampled together; bounds the memory of the cache.
    Raises: UserError: the folder's weights are not those of its config.
    """

    name = "decoder"

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_size: int = 256,
    ) -> None:
        config = model if isinstance(model, PretrainedConfig) else load_config(Path(model))
        assert unsupported(config) is None, unsupported(config)
        super().__init__(config, device, max_batch_size)
        self.decoder = Decoder(config, dtype, self.device)
        if not isinstance(model, PretrainedConfig):
            self._load(Path(model))

    def _load(self, folder: Path) -> None:
        known = self._weights()
        try:  # like transformers, without a look at what is no weight of the model
            self.update_weights((name, tensor) for name, tensor in stream_weights(folder) if name in known)
        except ValueError as error:
            raise UserError(f"cannot load a causal language model from {folder}: {error}") from None

    @torch.no_grad()
    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """See `LocalGenerator.logits`."""
        return self.decoder.logits(sequences)

    def _weights(self) -> Mapping[str, Tensor]:
        return self.decoder.weights.named

    def _read(self, prompts: list[list[int]], prompt_of_row: Tensor, room: int) -> _Decoding:
        return _Decoding(self.decoder, *self.decoder.read(prompts, prompt_of_row, room))


class _Decoding:
    """See `local_generator.Decoding`."""

    def __init__(self, decoder: Decoder, logits: Tensor, cache: KVCache) -> None:
        self.logits, self._decoder, self._cache = logits, decoder, cache

    def keep(self, going: Tensor) -> Tensor:
        return self._cache.keep(going)

    def advance(self, tokens: Tensor) -> None:
        self.logits = self._decoder.step(tokens, self._cache)
