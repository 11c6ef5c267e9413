"""Drawing a token from logits, and random numbers that belong to a response."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_grpo.engine.protocols import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """One token per row and its logprobs under the three distributions of `Rollout`, all [R]."""

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    unscaled_logprobs: Tensor


def draw(logits: Tensor, sampling: SamplingParams, uniforms: Tensor | None) -> Drawn:
    """Choose the next token of each row.

    Inverse of the cumulative distribution at u: one random number per token, whatever the vocabulary.

    Args:   logits: [R, V].  uniforms: [R] float64 in [0, 1); None for greedy.
    Raises: FloatingPointError: a row's logits are not finite.
    """
    unscaled = torch.log_softmax(logits.float(), dim=-1)
    if sampling.greedy:
        chosen, tokens = unscaled.max(-1)
        _check_finite(chosen)
        return Drawn(tokens, chosen, chosen, chosen)
    assert uniforms is not None
    scaled = unscaled
    if sampling.temperature != 1:
        scaled = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    filtered = _filter(scaled, sampling) if sampling.filters else scaled
    mass = filtered.exp().cumsum(-1, dtype=torch.float64)
    _check_finite(mass[:, -1])
    target = uniforms[:, None] * mass[:, -1:]
    tokens = torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    logprobs = _pick(scaled, tokens)
    return Drawn(
        tokens,
        logprobs,
        _pick(filtered, tokens) if sampling.filters else logprobs,
        _pick(unscaled, tokens) if sampling.temperature != 1 else logprobs,
    )


def _pick(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def _check_finite(values: Tensor) -> None:
    # A NaN or +inf logit makes all logprobs of its row NaN, and so what is computed from them.
    if not torch.isfinite(values).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights hold NaN or inf, or overflow"
        )


def _filter(logprobs: Tensor, sampling: SamplingParams) -> Tensor:
    """Logprobs after top_k and then top_p, renormalised; -inf for tokens that are left out."""
    if sampling.top_k is not None and sampling.top_k < logprobs.shape[-1]:
        smallest = logprobs.topk(sampling.top_k, dim=-1).values[:, -1:]
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < smallest, -torch.inf), dim=-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        left_out = torch.zeros_like(order, dtype=torch.bool)
        left_out.scatter_(-1, order, mass_before >= sampling.top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(left_out, -torch.inf), dim=-1)
    return logprobs


def response_uniforms(
    prompts: Sequence[list[int]], num_generations: int, max_new_tokens: int, seed: int
) -> Tensor:
    """Random numbers that stay with a prompt, whatever else is in the batch.

    Args:    prompts: token ids.
    Returns: [prompts x num_generations, max_new_tokens] float64 in [0, 1); a prompt's rows depend on the
             seed, its tokens, and how many times the same prompt came before it.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    generator = torch.Generator()
    rows = []
    for prompt in map(tuple, prompts):
        digest = hashlib.sha256(repr((seed, seen[prompt], prompt)).encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(num_generations, max_new_tokens, generator=generator, dtype=torch.float64))
        seen[prompt] += 1
    return torch.cat(rows)
