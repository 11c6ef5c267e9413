"""Sampling on one device, token by token: the loop around a model that can go on from where it is.

Why not a library's ``generate``: finished rows leave the batch here, a prompt is read once however many
responses it gets, logprobs cost one row of the vocabulary per step instead of all steps' scores, and random
numbers belong to a response instead of a place in the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_grpo.engine.protocols import Rollout, SamplingParams, Turn
from nemo_grpo.engine.sampling import Drawn, draw, response_uniforms
from nemo_grpo.errors import UserError


class Decoding(Protocol):
    """R responses that are going.

    Attributes: logits: [R, V] of each one's next token.
    """

    logits: Tensor

    def keep(self, going: Tensor) -> Tensor:
        """Drop the rows that are False in going [R]; returns the others' old numbers, in their new order."""
        ...

    def advance(self, tokens: Tensor) -> None:
        """Feed one token [R] per row."""
        ...


class LocalGenerator(ABC):
    """A `Generator` on one device.

    Attributes: name: as nemo_grpo.engine.generator calls it.
    """

    name: str

    def __init__(self, config: Any, device: torch.device | str, max_batch_size: int) -> None:
        """``max_batch_size``: responses that are sampled together; bounds the memory of the cache."""
        assert max_batch_size >= 1, max_batch_size
        self.device = torch.device(device)
        self.max_batch_size = max_batch_size
        self._config = config
        self._complete = False

    @abstractmethod
    def _weights(self) -> Mapping[str, Tensor]:
        """What `update_weights` writes, by Hugging Face name; tied weights have one memory."""

    @abstractmethod
    def _read(self, prompts: list[list[int]], prompt_of_row: Tensor, room: int) -> Decoding:
        """Read each prompt once; rows begin with prompt_of_row [R] and get at most ``room`` tokens more."""

    @abstractmethod
    def logits(self, sequences: Sequence[list[int]]) -> Tensor:
        """[B, S, V] of whole sequences, one pass; columns behind a sequence's end mean nothing."""

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `Generator.update_weights`. Tensors are copied one by one as they come.

        A tied weight may come under one of its names, or under several with equal values.
        """
        self._complete = False
        weights = self._weights()
        written: dict[int, str] = {}
        for name, tensor in named_tensors:
            target = weights.get(name)
            if target is None:
                raise ValueError(f"unexpected weight {name!r}: {self._describe()} has no such one")
            if target.shape != tensor.shape:
                raise ValueError(f"weight {name!r} has shape {[*tensor.shape]}, not {[*target.shape]}")
            tied_to = written.get(target.data_ptr())
            value = tensor.to(device=target.device, dtype=target.dtype)
            if tied_to is not None and not torch.equal(target, value):
                raise ValueError(f"weight {name!r} differs from {tied_to!r}, to which the model ties it")
            target.copy_(value)
            written.setdefault(target.data_ptr(), name)
        missing = [name for name, target in weights.items() if target.data_ptr() not in written]
        if missing:
            raise ValueError(f"{len(missing)} weights missing: {', '.join(missing[:8])}")
        self._complete = True

    def _describe(self) -> str:
        return f"a model with model_type={self._config.model_type}"

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        num_generations: int,
        sampling: SamplingParams,
        seed: int,
        turn: Turn | None = None,
    ) -> Rollout:
        """See `Generator.generate`.

        Args:   prompts: token ids, none empty.  num_generations: >= 1.
        Raises: UserError: a prompt and its response do not fit into the model's context.
                FloatingPointError: the model's logits are not finite.
        """
        assert self._complete, "weights are not complete: update_weights has not been called, or it failed"
        assert prompts
        assert all(prompts)
        assert num_generations >= 1
        limits = [sampling.max_new_tokens] * len(prompts) if turn is None else turn.max_new_tokens
        self._check_context(prompts, limits)
        prompt_of_row = torch.arange(len(prompts)).repeat_interleave(num_generations)
        uniforms = None
        if not sampling.greedy:
            uniforms = response_uniforms(prompts, num_generations, sampling.max_new_tokens, seed)
            uniforms = uniforms.to(self.device)
        responses = _Responses(torch.tensor(limits)[prompt_of_row], sampling, turn, self.device)
        for rows in self._batches(prompts, prompt_of_row):
            self._fill(responses, rows, prompt_of_row[rows], prompts, uniforms)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])[prompt_of_row]
        return responses.rollout(prompt_lengths)

    def _check_context(self, prompts: list[list[int]], limits: list[int]) -> None:
        context = getattr(self._config, "max_position_embeddings", None)
        needed, prompt, response = max(
            (len(prompt) + limit, len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)
        )
        if context is not None and needed > context:
            raise UserError(
                f"prompt and response must fit into the model's max_position_embeddings={context}; the "
                f"longest prompt has {prompt} tokens and max_new_tokens={response}: lower one of them"
            )

    def _batches(self, prompts: list[list[int]], prompt_of_row: Tensor) -> Iterator[Tensor]:
        """Row numbers, at most max_batch_size at a time, prompts of like length together (little padding)."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])[prompt_of_row]
        yield from torch.argsort(lengths, stable=True).split(self.max_batch_size)

    @torch.inference_mode()  # less work per operation than no_grad, and there are many small ones
    def _fill(
        self,
        responses: _Responses,
        rows: Tensor,
        prompt_of_row: Tensor,
        prompts: list[list[int]],
        uniforms: Tensor | None,
    ) -> None:
        """Sample the responses of these rows."""
        wanted, prompt_of_row = torch.unique(prompt_of_row, return_inverse=True)
        room = responses.longest(rows)
        state = self._read([prompts[number] for number in wanted.tolist()], prompt_of_row, room)
        rows = rows.to(self.device)
        for step in range(room):
            here = None if uniforms is None else uniforms[rows, step]
            drawn = draw(state.logits, responses.sampling, here)
            tokens, going = drawn.tokens, responses.append(rows, step, drawn)
            num_going = int(going.sum())
            if num_going == 0:
                return
            if num_going < len(rows):
                order = state.keep(going)
                rows, tokens = rows[order], tokens[order]
            state.advance(tokens)


class _Responses:
    """Everything that is drawn, in the order of the steps, until it is laid out at the end."""

    def __init__(
        self, limits: Tensor, sampling: SamplingParams, turn: Turn | None, device: torch.device
    ) -> None:
        """``limits``: [B], the most tokens of each response."""
        self.sampling = sampling
        self._limits, self._device_limits = limits, limits.to(device)
        self._end = None if turn is None else turn.end
        self._written: list[list[int]] = [[] for _ in limits] if turn is not None else []
        self._stop_tokens = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        self._rows: list[Tensor] = []
        self._steps: list[int] = []
        self._drawn: list[Drawn] = []
        self._stopped: list[Tensor] = []

    def longest(self, rows: Tensor) -> int:
        """The most tokens that one of these may have."""
        return int(self._limits[rows].max())

    def append(self, rows: Tensor, step: int, drawn: Drawn) -> Tensor:
        """Add a token to each of these R rows; [R] bool: the response goes on behind it."""
        stopped = (drawn.tokens[:, None] == self._stop_tokens).any(-1)
        if self._end is not None:
            stopped |= self._ended(rows, drawn.tokens)
        self._rows.append(rows)
        self._steps.append(step)
        self._drawn.append(drawn)
        self._stopped.append(stopped)
        return ~stopped & (self._device_limits[rows] > step + 1)

    def _ended(self, rows: Tensor, tokens: Tensor) -> Tensor:
        assert self._end is not None
        ended = []
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._written[row].append(token)
            ended.append(self._end.reached(self._written[row][-self._end.num_tokens :]))
        return torch.tensor(ended, device=tokens.device)

    def rollout(self, prompt_lengths: Tensor) -> Rollout:
        """All responses, on the CPU."""
        rows = torch.cat(self._rows).cpu()
        steps = torch.tensor(self._steps).repeat_interleave(torch.tensor([len(part) for part in self._rows]))
        shape = (len(self._limits), int(steps.max()) + 1)

        def laid_out(name: str) -> Tensor:
            values = torch.cat([getattr(drawn, name) for drawn in self._drawn]).cpu()
            return values.new_zeros(shape).index_put_((rows, steps), values)

        truncated = torch.ones(shape[0], dtype=torch.bool)
        truncated[rows[torch.cat(self._stopped).cpu()]] = False
        logprobs = laid_out("logprobs")
        scaled = not self.sampling.greedy and self.sampling.temperature != 1
        return Rollout(
            tokens=laid_out("tokens"),
            logprobs=logprobs,
            sampling_logprobs=laid_out("sampling_logprobs") if self.sampling.filters else logprobs,
            unscaled_logprobs=laid_out("unscaled_logprobs") if scaled else logprobs,
            lengths=torch.bincount(rows, minlength=shape[0]),
            truncated=truncated,
            prompt_lengths=prompt_lengths,
        )
