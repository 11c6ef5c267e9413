"""Sampling with a Hugging Face causal language model: any that transformers knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.hf_folder import no_transformers_bars

_LOADING = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}


class HFGenerator(LocalGenerator):
    """A `LocalGenerator` for every model that transformers knows."""

    name = "hf"

    def _build(self, model: Path | PretrainedConfig, dtype: torch.dtype) -> None:
        loaded = _load(model, dtype) if isinstance(model, Path) else _random(model, dtype)
        self._config = loaded.config
        # A prompt is read once, and its cache is copied to all of its responses: every layer must allow that.
        layers = DynamicCache(config=loaded.config).layers
        if loaded._is_stateful or not all(hasattr(layer, "batch_select_indices") for layer in layers):
            raise UserError(
                f"generator=hf cannot sample from model_type={loaded.config.model_type}: it has recurrent "
                "layers, whose state several responses to a prompt cannot share; use vllm"
            )
        self.model: torch.nn.Module = loaded.eval().requires_grad_(False)
        self.model.to(self.device)
        self._complete = isinstance(model, Path)

    @property
    def context(self) -> tuple[float, str, str]:
        """See `LocalGenerator.context`. Longrope has a lower limit, explained below."""
        limit, name, remedy = super().context
        rope = getattr(self._config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return limit, name, remedy
        # If one row exceeds this length, transformers changes the frequencies of the whole batch. Then a
        # response would depend on the others in its batch.
        return (
            min(limit, rope["original_max_position_embeddings"]),
            "the longrope model's original_max_position_embeddings",
            f"{remedy}, or use vllm",
        )

    @torch.no_grad()
    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """See `LocalGenerator.logits`. Padding is on the right, where causal attention never looks at it."""
        width = max(map(len, sequences))
        padding = [[0] * (width - len(row)) for row in sequences]
        ids = [row + pad for row, pad in zip(sequences, padding, strict=True)]
        mask = [[1] * len(row) + pad for row, pad in zip(sequences, padding, strict=True)]
        return self.model(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
        ).logits

    def _writable(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext(self.model.state_dict())

    def _read(self, prompts: list[list[int]], prompt_of_row: Tensor, room: int) -> _Decoding:
        """Read the prompts, left-padded, and give every row its prompt's cache."""
        width = max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        padded = [pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        visible = [pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(padded, device=self.device)
        mask = torch.tensor(visible, device=self.device)
        # Positions count a prompt's tokens without its padding, as training does.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._config)
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        state = _Decoding(self.model, logits, cache, mask, positions[:, -1])
        state.select(prompt_of_row.to(self.device))
        return state


class _Decoding:
    """See `local_generator.Decoding`.

    It holds R rows: logits [R, V], cache, mask [R, columns] and position [R].
    """

    def __init__(
        self, model: torch.nn.Module, logits: Tensor, cache: DynamicCache, mask: Tensor, position: Tensor
    ) -> None:
        self.logits = logits
        self._model = model
        self._cache = cache
        self._mask = mask
        self._position = position

    def select(self, index: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self.logits = self.logits[index]
        self._mask = self._mask[index]
        self._position = self._position[index]
        self._cache.batch_select_indices(index)

    def keep(self, going: Tensor) -> Tensor:
        order = going.nonzero()[:, 0]
        self.select(order)
        return order

    def advance(self, tokens: Tensor) -> None:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        self._position = self._position + 1
        self.logits = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._position[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]


def _random(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    # The model's initialisation draws from torch's global generator, whose state a run must not change.
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder (no config.json); give one that is")
    try:
        with no_transformers_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **_LOADING)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"cannot load a causal language model from {folder}: {first_line(error)}") from error
    model, report = loaded
    # Transformers fills gaps with random weights and only warns.
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    gaps = sorted([*report["missing_keys"], *mismatched])
    if gaps:
        raise UserError(f"{folder} lacks {len(gaps)} weights of its architecture: {', '.join(gaps[:4])}")
    # Weights mapped from a file may have any alignment, and the rounding of CPU kernels depends on it. The
    # same weights must give the same responses, whether they come from a file or from an update.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
