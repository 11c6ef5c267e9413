"""Drawing a token from logits, and random numbers that belong to a response."""

import hashlib

import torch
from torch import Tensor

from nemo_grpo.sampling.requests import Request, SamplingParams


def draw(logits: Tensor, sampling: SamplingParams, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row.

    Inverse of the cumulative distribution at u: one random number per token, whatever the vocabulary.

    Args:    logits: [R, V].  uniforms: [R] float64 in [0, 1); None for greedy.
    Returns: tokens [R], and their logprobs [R] as in `Rollout`.
    Raises:  FloatingPointError: a row's logits are not finite.
    """
    scaled = logits.float()
    if sampling.temperature != 1 and not sampling.greedy:
        scaled = scaled / sampling.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if sampling.greedy:
        chosen, tokens = logprobs.max(-1)
        _check_finite(chosen)
        return tokens, chosen
    assert uniforms is not None
    mass = _filter(logprobs, sampling).exp().cumsum(-1, dtype=torch.float64)
    _check_finite(mass[:, -1])
    target = uniforms[:, None] * mass[:, -1:]
    tokens = torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


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


def response_uniforms(request: Request) -> Tensor:
    """Random numbers that stay with a prompt, whatever else is in the request.

    Returns: [prompts x num_generations, max_new_tokens] float64 in [0, 1); a prompt's rows depend on the
             seed, its tokens, and how many times the same prompt came before it.
    """
    generator = torch.Generator()
    shape = request.num_generations, request.sampling.max_new_tokens
    rows = []
    for prompt, occurrence in zip(request.prompts, request.occurrences, strict=True):
        digest = hashlib.sha256(repr((request.seed, occurrence, tuple(prompt))).encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.cat(rows)
