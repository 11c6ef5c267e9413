"""Sampling of a token from logits, with random numbers that belong to a response."""

import hashlib

import torch
from torch import Tensor

from nemo_grpo.sampling.requests import Request, SamplingParams


def draw(logits: Tensor, sampling: SamplingParams, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row.

    The token is the one at which the cumulative distribution passes the row's random number. So a token takes
    one random number, for any size of the vocabulary.

    Args:
        logits: [R, V].
        sampling: temperature and filters.
        uniforms: [R] float64, a random number in [0, 1) for each row; None for greedy.

    Returns:
        Tokens [R], and their logprobs [R] as in `Rollout`.

    Raises:
        FloatingPointError: a row's logits are not finite.
    """
    scaled = logits.float()
    if sampling.temperature != 1 and not sampling.greedy:
        scaled = scaled / sampling.temperature
    probabilities = scaled.softmax(-1)
    # This sum is not exactly 1, because softmax rounds.
    total = probabilities.sum(-1)
    # A NaN or +inf logit makes all probabilities of its row NaN, so it is enough to check the sums.
    if not torch.isfinite(total).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights hold NaN or inf, or overflow"
        )
    if sampling.greedy:
        tokens = probabilities.argmax(-1)
    else:
        assert uniforms is not None
        # Float64, because float32 sums over a large vocabulary would round unlikely tokens away.
        mass = _filter(probabilities, sampling).cumsum(-1, dtype=torch.float64)
        target = uniforms[:, None] * mass[:, -1:]
        # right=True skips tokens of probability 0, whose sum equals that of the token before them. The clamp
        # is for a ``target`` that rounds up to the total mass, beyond which there is no token.
        tokens = torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    drawn_probabilities = probabilities.gather(-1, tokens[:, None])[:, 0]
    return tokens, (drawn_probabilities / total).log_()


def _filter(probabilities: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply top_k, then top_p to probabilities [R, V]. Tokens that are filtered out get 0; others stay."""
    if sampling.top_k is not None and sampling.top_k < probabilities.shape[-1]:
        smallest = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = ordered.cumsum(-1)
        # Tokens are left out once those before them reach top_p; the token that reaches it stays.
        mass_before = mass - ordered
        left_out = torch.zeros_like(order, dtype=torch.bool)
        left_out.scatter_(-1, order, mass_before >= sampling.top_p * mass[:, -1:])
        probabilities = probabilities.masked_fill(left_out, 0)
    return probabilities


def response_uniforms(request: Request) -> Tensor:
    """Draw random numbers for each prompt that do not depend on the request's other prompts.

    Returns:
        [prompts x num_generations, max_new_tokens] float64 in [0, 1). A prompt's rows depend on the seed, its
        tokens, and how many times the same prompt came before it.
    """
    # Drawn on the CPU, so that the numbers are the same for every device.
    generator = torch.Generator()
    shape = (request.num_generations, request.sampling.max_new_tokens)
    rows = []
    for prompt, occurrence in zip(request.prompts, request.occurrences, strict=True):
        digest = hashlib.sha256(repr((request.seed, occurrence, tuple(prompt))).encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.cat(rows)
