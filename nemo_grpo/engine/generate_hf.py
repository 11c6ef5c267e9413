"""Sampling with a Hugging Face causal language model: own loop around its forward pass, with KV cache.

Why not ``model.generate``: finished rows leave the batch here, a prompt is read once however many responses
it gets, logprobs cost one row of the vocabulary per step instead of all steps' scores, and random numbers
belong to a response instead of a place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from nemo_grpo.engine.progress import no_transformers_bars
from nemo_grpo.engine.protocols import Rollout, SamplingParams, Turn
from nemo_grpo.engine.sampling import Drawn, draw, response_uniforms
from nemo_grpo.errors import UserError

_LOADING = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}


class HFGenerator:
    """A `Generator` on one device.

    Args:
        model: a folder with config and weights, or a configuration; then `update_weights` must come first.
        dtype: of weights and cache; logprobs are computed in float32 whatever it is.
        max_batch_size: responses that are sampled together; bounds the memory of the cache.
    Raises: UserError: the folder is not there or holds no model.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_size: int = 256,
    ) -> None:
        assert max_batch_size >= 1, max_batch_size
        loaded = _random(model, dtype) if isinstance(model, PretrainedConfig) else _load(Path(model), dtype)
        self.device = torch.device(device)
        self.model: torch.nn.Module = loaded.eval().requires_grad_(False)
        self.model.to(self.device)
        self.max_batch_size = max_batch_size
        self._config: Any = loaded.config
        self._complete = not isinstance(model, PretrainedConfig)

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `Generator.update_weights`. Tensors are copied one by one as they come.

        A tied weight may come under one of its names, or under several with equal values.
        """
        self._complete = False
        weights = self.model.state_dict()
        written: dict[int, str] = {}
        for name, tensor in named_tensors:
            target = weights.get(name)
            if target is None:
                raise ValueError(f"unexpected weight {name!r}: {type(self.model).__name__} has no such one")
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
        result = _Responses(torch.tensor(limits)[prompt_of_row], sampling, turn)
        for rows in self._batches(prompts, prompt_of_row):
            self._fill(result, rows, prompt_of_row, prompts, sampling, uniforms)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])[prompt_of_row]
        return result.rollout(prompt_lengths)

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

    def _fill(
        self,
        result: _Responses,
        rows: Tensor,
        prompt_of_row: Tensor,
        prompts: list[list[int]],
        sampling: SamplingParams,
        uniforms: Tensor | None,
    ) -> None:
        """Sample the responses of these rows."""
        wanted, prompt_of_row = torch.unique(prompt_of_row[rows], return_inverse=True)
        state = self._read_prompts([prompts[i] for i in wanted.tolist()], prompt_of_row.to(self.device))
        for step in range(sampling.max_new_tokens):
            drawn = draw(state.logits, sampling, None if uniforms is None else uniforms[rows, step]).cpu()
            going = result.append(rows, step, drawn)
            if not going.any():
                return
            if not going.all():
                rows = rows[going]
                state.keep(going.nonzero()[:, 0].to(self.device))
            state.advance(self.model, drawn.tokens[going].to(self.device))

    @torch.inference_mode()  # less work per operation than no_grad, and there are many small ones
    def _read_prompts(self, prompts: list[list[int]], prompt_of_row: Tensor) -> _Decoding:
        """Run each prompt once, left-padded, then give every row its prompt's cache."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
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
        state = _Decoding(logits, cache, mask, positions[:, -1])
        state.keep(prompt_of_row)
        return state


class _Decoding:
    """What the next step needs of the R rows still going: logits [R, V], cache, mask [R, L], position [R]."""

    def __init__(self, logits: Tensor, cache: DynamicCache, mask: Tensor, position: Tensor) -> None:
        self.logits, self.cache, self.mask, self.position = logits, cache, mask, position

    def keep(self, index: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self.logits, self.mask, self.position = self.logits[index], self.mask[index], self.position[index]
        self.cache.batch_select_indices(index)

    @torch.inference_mode()
    def advance(self, model: torch.nn.Module, tokens: Tensor) -> None:
        """Feed one token per row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.position = self.position + 1
        self.logits = model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]


class _Responses:
    """The growing result, on the CPU: [B, max_new_tokens] until it is cut at the longest response."""

    def __init__(self, limits: Tensor, sampling: SamplingParams, turn: Turn | None) -> None:
        """``limits``: [B], the most tokens of each response."""
        num_rows = len(limits)
        shape = (num_rows, sampling.max_new_tokens)
        self.limits, self.sampling = limits, sampling
        self.end = None if turn is None else turn.end
        self.stop_tokens = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        self.tokens = torch.zeros(shape, dtype=torch.long)
        self.logprobs = torch.zeros(shape)
        scaled = not sampling.greedy and sampling.temperature != 1
        self.sampling_logprobs = torch.zeros(shape) if sampling.filters else self.logprobs
        self.unscaled_logprobs = torch.zeros(shape) if scaled else self.logprobs
        self.lengths = torch.zeros(num_rows, dtype=torch.long)
        self.truncated = torch.ones(num_rows, dtype=torch.bool)

    def append(self, rows: Tensor, step: int, drawn: Drawn) -> Tensor:
        """Add a token to each of these R rows; [R] bool: the response goes on behind it."""
        self.tokens[rows, step] = drawn.tokens
        self.logprobs[rows, step] = drawn.logprobs
        self.sampling_logprobs[rows, step] = drawn.sampling_logprobs
        self.unscaled_logprobs[rows, step] = drawn.unscaled_logprobs
        self.lengths[rows] = step + 1
        stopped = torch.isin(drawn.tokens, self.stop_tokens)
        if self.end is not None:
            # Not the whole turn: copied at every step, that would take time quadratic in its length.
            last = self.tokens[rows, max(0, step + 1 - self.end.num_tokens) : step + 1].tolist()
            stopped |= torch.tensor([self.end.reached(tokens) for tokens in last])
        self.truncated[rows] = ~stopped
        return ~stopped & (step + 1 < self.limits[rows])

    def rollout(self, prompt_lengths: Tensor) -> Rollout:
        longest = int(self.lengths.max())
        logprobs = self.logprobs[:, :longest].clone()

        def cut(values: Tensor) -> Tensor:
            return logprobs if values is self.logprobs else values[:, :longest].clone()

        return Rollout(
            tokens=cut(self.tokens),
            logprobs=logprobs,
            sampling_logprobs=cut(self.sampling_logprobs),
            unscaled_logprobs=cut(self.unscaled_logprobs),
            lengths=self.lengths,
            truncated=self.truncated,
            prompt_lengths=prompt_lengths,
        )


def _random(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    # Initialisation draws from the global generator; whoever makes a generator must not notice.
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder (no config.json); give one that is")
    try:
        with no_transformers_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **_LOADING)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load a causal language model from {folder}: {reason}") from error
    model, report = loaded
    # Transformers fills gaps with random weights and only warns.
    gaps = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    if gaps:
        raise UserError(f"{folder} lacks {len(gaps)} weights of its architecture: {', '.join(gaps[:4])}")
    # A file's weights may lie at any alignment, and CPU kernels round by alignment: the same weights must
    # give the same responses, whether they were read or copied in.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
