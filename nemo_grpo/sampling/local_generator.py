"""Sampling on one device, token by token: the loop around a model that keeps a cache of its context.

It differs from transformers' ``generate`` in four ways. Finished rows leave the batch. A prompt is read once
for all of its responses. Only the sampled tokens' logprobs are stored, not the scores [B, V] of every step.
Random numbers belong to a response and not to its place in the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_grpo.sampling.draws import draw, response_uniforms
from nemo_grpo.sampling.requests import Request, Rollout


class Decoding(Protocol):
    """State of a model in the middle of R unfinished responses.

    Attributes:
        logits: [R, V], logits of each response's next token.
    """

    logits: Tensor

    def keep(self, going: Tensor) -> Tensor:
        """Drop the rows that are False in going [R].

        Returns:
            The old numbers of the remaining rows, in their new order.
        """
        ...

    def advance(self, tokens: Tensor) -> None:
        """Feed one token [R] per row."""
        ...


class LocalGenerator(ABC):
    """A `Generator` on one device.

    Attributes:
        name: value of the recipe's nemo_grpo.engine.generator that selects it.
    """

    name: str
    _config: PretrainedConfig

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_size: int = 256,
    ) -> None:
        """Build the model, with a folder's weights or with uninitialised ones.

        Args:
            model: a folder with config and weights, or only a configuration. With a configuration, call
                `update_weights` before the first sampling.
            dtype: dtype of weights and cache. Logprobs are always computed in float32.
            max_batch_size: largest number of responses sampled together, which bounds the cache's memory.
        """
        assert max_batch_size >= 1, max_batch_size
        self.device = torch.device(device)
        self.max_batch_size = max_batch_size
        self._complete = False
        self._build(model if isinstance(model, PretrainedConfig) else Path(model), dtype)

    @abstractmethod
    def _build(self, model: Path | PretrainedConfig, dtype: torch.dtype) -> None:
        """Set ``_config`` and build the model. If ``model`` is a folder, also read its weights."""

    @abstractmethod
    def _writable(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Open the weights for writing, as Hugging Face name -> tensor. Tied weights share memory."""

    @abstractmethod
    def _read(self, prompts: list[list[int]], prompt_of_row: Tensor, room: int) -> Decoding:
        """Read each prompt once. Row r begins with prompt prompt_of_row[r] and gets up to ``room`` tokens."""

    @abstractmethod
    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """Compute logits [B, S, V] of whole sequences in one pass. Ignore those after a sequence's end."""

    @property
    def context(self) -> tuple[float, str, str]:
        """Return (largest length of a prompt with its response in tokens, name of that limit, remedy)."""
        limit = getattr(self._config, "max_position_embeddings", None)
        if limit is None:
            limit = math.inf
        return limit, "the model's max_position_embeddings", "lower one of them"

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `Generator.update_weights`. Each tensor is copied as it arrives.

        A tied weight may arrive under any of its names, or under several with equal values.
        """
        # If the update fails half way, `generate` must refuse to sample.
        self._complete = False
        with self._writable() as weights:
            _write(weights, named_tensors, self._config.model_type)
        self._complete = True

    @torch.no_grad()
    def generate(self, request: Request) -> Rollout:
        """See `Generator.generate`.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        assert not request.images, "images are sampled by vLLM alone"
        assert self._complete, "weights are not complete: update_weights has not been called, or it failed"
        request.check_context(*self.context)
        uniforms = None if request.sampling.greedy else response_uniforms(request).to(self.device)
        responses = _Responses(request, self.device)
        # Sorted, so that prompts of similar length share a batch with little padding.
        order = torch.argsort(request.lengths, stable=True)
        for rows in order.split(self.max_batch_size):
            self._fill(responses, rows, request, uniforms)
        return responses.rollout()

    # inference_mode does less work per operation than no_grad, and a step has many small operations.
    @torch.inference_mode()
    def _fill(self, responses: _Responses, rows: Tensor, request: Request, uniforms: Tensor | None) -> None:
        """Sample the responses of these rows of the request, all together."""
        prompt_numbers, prompt_of_row = torch.unique(rows // request.num_generations, return_inverse=True)
        prompts = [request.prompts[number] for number in prompt_numbers.tolist()]
        room = responses.longest(rows)
        state = self._read(prompts, prompt_of_row, room)
        rows = rows.to(self.device)
        for step in range(room):
            step_uniforms = None if uniforms is None else uniforms[rows, step]
            tokens, logprobs = draw(state.logits, request.sampling, step_uniforms)
            going = responses.append(rows, step, tokens, logprobs)
            num_going = int(going.sum())
            if request.meter is not None:
                request.meter(len(rows), len(rows) - num_going)
            if num_going == 0:
                return
            if num_going < len(rows):
                order = state.keep(going)
                rows = rows[order]
                tokens = tokens[order]
            state.advance(tokens)


class _Responses:
    """Buffers of a request's sampled tokens, filled step by step until all responses are complete."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self._limits = torch.tensor(request.limits).repeat_interleave(request.num_generations)
        # The limits are also on the tokens' device, so that a step copies nothing between devices.
        self._device_limits = self._limits.to(device)
        self._end = None if request.turn is None else request.turn.end
        # Tokens of each row on the CPU. They are needed only if a stop text may end a turn.
        self._written: list[list[int]] = []
        if self._end is not None:
            self._written = [[] for _ in self._limits]
        stop_token_ids = request.sampling.stop_token_ids
        self._stop_tokens = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self._rows: list[Tensor] = []
        self._steps: list[int] = []
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._stopped: list[Tensor] = []

    def longest(self, rows: Tensor) -> int:
        """Return the largest number of tokens that one of these rows may have."""
        return int(self._limits[rows].max())

    def append(self, rows: Tensor, step: int, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append one token to each of these R rows. Returns [R] bool, True for unfinished responses."""
        stopped = (tokens[:, None] == self._stop_tokens).any(-1)
        if self._written:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                self._written[row].append(token)
        if self._end is not None:
            stopped |= self._turn_ended(rows)
        self._rows.append(rows)
        self._steps.append(step)
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._stopped.append(stopped)
        return ~stopped & (self._device_limits[rows] > step + 1)

    def _turn_ended(self, rows: Tensor) -> Tensor:
        assert self._end is not None
        tails = (self._written[row][-self._end.num_tokens :] for row in rows.tolist())
        return torch.tensor([self._end.reached(tail) for tail in tails], device=rows.device)

    def rollout(self) -> Rollout:
        """Return all responses in padded tensors on the CPU."""
        rows = torch.cat(self._rows).cpu()
        num_rows_of_step = torch.tensor([len(part) for part in self._rows])
        steps = torch.tensor(self._steps).repeat_interleave(num_rows_of_step)
        shape = (len(self._limits), int(steps.max()) + 1)

        def laid_out(parts: list[Tensor]) -> Tensor:
            values = torch.cat(parts).cpu()
            return values.new_zeros(shape).index_put_((rows, steps), values)

        # A response is truncated unless one of its tokens has stopped it.
        truncated = torch.ones(shape[0], dtype=torch.bool)
        truncated[rows[torch.cat(self._stopped).cpu()]] = False
        return Rollout(
            tokens=laid_out(self._tokens),
            logprobs=laid_out(self._logprobs),
            lengths=torch.bincount(rows, minlength=shape[0]),
            truncated=truncated,
        )


def _write(
    weights: Mapping[str, Tensor], named_tensors: Iterable[tuple[str, Tensor]], model_type: str
) -> None:
    """Copy tensors into the weights of the same names, and check that all weights have come."""
    # Address of a weight's memory -> the name that wrote it. Tied weights share memory, so one of their names
    # is enough.
    name_by_memory: dict[int, str] = {}
    for name, tensor in named_tensors:
        target = weights.get(name)
        if target is None:
            raise ValueError(f"unexpected weight {name!r}: {model_type=!s} has none of this name")
        if target.shape != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {[*tensor.shape]}, not {[*target.shape]}")
        tied_to = name_by_memory.get(target.data_ptr())
        value = tensor.to(device=target.device, dtype=target.dtype)
        if tied_to is not None and not torch.equal(target, value):
            raise ValueError(f"weight {name!r} differs from {tied_to!r}, to which the model ties it")
        target.copy_(value)
        name_by_memory.setdefault(target.data_ptr(), name)
    missing_weights = [name for name, target in weights.items() if target.data_ptr() not in name_by_memory]
    if missing_weights:
        raise ValueError(f"{len(missing_weights)} weights missing: {', '.join(missing_weights[:8])}")
