"""Next-token logprobs and entropies from logits, chunk by chunk, with the backward pass written out.

A plain ``log_softmax(logits.float())`` keeps two fp32 copies of the logits alive for autograd. Here the
forward pass keeps one number per token besides the logits themselves, and the backward pass builds the
gradient in the logits' own dtype; fp32 exists only for one chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20
"""Elements of the default chunk: 4 MiB in fp32, small beside any logits."""


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and the entropy of its distribution.

    logp = z_y - lse(z),   H = lse(z) - sum_v p_v z_v,   z = logits / temperature
    d logp / d z_v = 1[v=y] - p_v,   d H / d z_v = -p_v (log p_v + H)

    Args:    logits: [..., V], any float dtype.
             targets: [...] int64; column t is the token that logits t predict.
             temperature: > 0.
             chunk_size: tokens per fp32 chunk, default `CHUNK_ELEMENTS` / V; extra memory is some 4 chunks.
    Returns: (logprobs [...], entropies [...]), nats; float32, float64 for float64 logits; both with gradient.
    Raises:  ValueError: shapes that do not fit, temperature or chunk_size <= 0.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)}; it must be {list(logits.shape[:-1])}, as the logits"
        )
    vocab = logits.shape[-1]
    chunk_size = max(1, CHUNK_ELEMENTS // vocab) if chunk_size is None else chunk_size
    if temperature <= 0 or chunk_size <= 0:
        raise ValueError(f"temperature={temperature} and chunk_size={chunk_size} must be positive")
    flat = logits.reshape(-1, vocab)
    logprobs, entropies = _ChunkedLogprobs.apply(flat, targets.reshape(-1), temperature, chunk_size)
    return logprobs.view(targets.shape), entropies.view(targets.shape)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _ChunkedLogprobs(torch.autograd.Function):
    """[N, V] logits, [N] targets -> [N] logprobs, [N] entropies."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulation_dtype(logits.dtype)
        lse = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        logprobs, entropies = torch.empty_like(lse), torch.empty_like(lse)
        for rows in _chunks(logits.shape[0], chunk):
            z = logits[rows].to(dtype, copy=True).div_(temperature)
            lse[rows] = torch.logsumexp(z, -1)
            logprobs[rows] = z.gather(-1, targets[rows, None])[:, 0] - lse[rows]
            # -inf logits (masked vocabulary) have probability 0 and must add 0, not 0 * inf.
            expected = torch.exp(z - lse[rows, None]).mul_(z.clamp_(min=torch.finfo(dtype).min))
            entropies[rows] = lse[rows] - expected.sum(-1)
        ctx.save_for_backward(logits, targets, lse, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # an output that nobody used costs nothing in backward
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, targets, lse, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits.shape[0], ctx.chunk):
            log_p = logits[rows].to(lse.dtype, copy=True).div_(ctx.temperature).sub_(lse[rows, None])
            p = log_p.exp()
            g = torch.zeros_like(p)
            if grad_logprobs is not None:
                g.sub_(p * grad_logprobs[rows, None])
                g.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None].to(g.dtype))
            if grad_entropies is not None:
                log_p.clamp_(min=torch.finfo(lse.dtype).min).add_(entropies[rows, None]).mul_(p)
                g.sub_(log_p.mul_(grad_entropies[rows, None]))
            gradient[rows] = g.div_(ctx.temperature).to(gradient.dtype)
        return gradient, None, None, None


def _chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
