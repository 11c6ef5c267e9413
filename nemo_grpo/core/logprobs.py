"""Next-token logprobs and entropies from logits, chunk by chunk, with the backward pass written out.

A plain ``log_softmax(logits.float())`` keeps two fp32 copies of the logits alive for autograd. Here the
forward pass keeps four numbers per token besides the logits themselves, and the backward pass builds the
gradient in the logits' own dtype; fp32 exists only for one chunk at a time. Logits may be sharded over the
vocabulary: the ranks exchange four numbers per token in the forward pass and none in the backward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_grpo.core.batch import require

IGNORED = -100
"""The target of a position that predicts nothing, as in transformers and in torch's cross entropy."""

_CHUNKS = {"cpu": 2**17, "cuda": 2**25}
"""Logits per chunk. A CPU's allocator returns large blocks to the system, so every new one costs page faults.
A GPU launches a dozen kernels per chunk, and each must have more to do than a launch takes."""


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target token and the entropy of its distribution.

    logp = z_y - lse(z),   H = lse(z) - sum_v p_v z_v,   z = logits / temperature
    d logp / d z_v = 1[v=y] - p_v,   d H / d z_v = -p_v (log p_v + H)

    Args:    logits: [..., V] of any floating dtype; under ``group`` this rank's columns of the vocabulary.
             targets: [...] int64, global token ids; column t is the token that logits t predict. Where it is
                 `IGNORED` the logprob is 0 without gradient; the entropy is that of the distribution.
             temperature: > 0.
             chunk_size: tokens per fp32 chunk, default `_CHUNKS` / V. Takes about 4 chunks.
             group: the ranks that share the vocabulary (tensor parallel); all of them get the result.
             vocab_size: token ids >= this are padding and have probability 0. Default: no padding.
    Returns: (logprobs [...], entropies [...]), nats; float32, float64 for float64 logits; both with gradient.
    """
    return _apply(logits, targets, True, temperature, chunk_size, group, vocab_size)


def next_token_logprobs(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Compute only the logprobs of `logprobs_and_entropy`, with its options, at less cost."""
    return _apply(logits, targets, False, **options)[0]


def _apply(
    logits: Tensor,
    targets: Tensor,
    with_entropy: bool,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Any]:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)}; it must be {list(logits.shape[:-1])}, as the logits"
        )
    vocab = logits.shape[-1]
    if chunk_size is None:
        chunk_size = max(1, _CHUNKS.get(logits.device.type, _CHUNKS["cuda"]) // vocab)
    if temperature <= 0 or chunk_size <= 0:
        raise ValueError(f"temperature={temperature} and chunk_size={chunk_size} must be positive")
    shard = _Shard(group, vocab, vocab_size)
    counted = targets != IGNORED
    rule = f"a target is 0 to {shard.num_tokens - 1}, or {IGNORED} to ignore the position"
    require((targets >= 0) & (targets < shard.num_tokens) | ~counted, targets, "targets", rule)
    flat = logits.reshape(-1, vocab)
    logprobs, entropies = _ChunkedLogprobs.apply(
        flat, targets.reshape(-1), temperature, chunk_size, shard, with_entropy
    )
    logprobs = torch.where(counted, logprobs.view(targets.shape), 0.0)
    return logprobs, entropies.view(targets.shape) if with_entropy else None


class _Shard:
    """This rank's part of the vocabulary, and the sums over the ranks."""

    def __init__(self, group: dist.ProcessGroup | None, columns: int, vocab_size: int | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.first = 0 if self.group is None else self.group.rank() * columns
        self.columns = columns
        self.num_real = columns if vocab_size is None else min(max(vocab_size - self.first, 0), columns)
        all_columns = columns if self.group is None else columns * self.group.size()
        self.num_tokens = all_columns if vocab_size is None else min(vocab_size, all_columns)

    def scaled(self, logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
        """Return a chunk's logits of real tokens in the accumulation dtype; may be a view of ``logits``."""
        z = logits[:, : self.num_real].to(dtype)
        z = z if temperature == 1 else z / temperature
        # The softmax of only -inf is NaN, and a shard may hold nothing else.
        return z if self.group is None else z.clamp(min=torch.finfo(dtype).min)

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column of each target, clamped into this shard's real ones; True where it is here)."""
        column = targets - self.first
        here = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(self.num_real, 1) - 1), here

    def reduce(self, x: Tensor, op: Any) -> None:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)


class _ChunkedLogprobs(torch.autograd.Function):
    """[N, V] logits, [N] targets -> [N] logprobs, [N] entropies (None without ``with_entropy``)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        shard: _Shard,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32  # of the sums
        column, here = shard.local(targets)
        chosen = logits.gather(-1, column[:, None])[:, 0].to(dtype) / temperature
        floor = torch.finfo(dtype).min
        top = torch.full_like(chosen, floor)  # this shard's highest logit; sums are of z - top
        log_sum = torch.zeros_like(chosen)  # log sum exp(z - top)
        total = torch.ones_like(chosen)  # sum of softmax's probabilities, 1 but for rounding
        mean = torch.zeros_like(chosen)  # expectation of z - top over this shard
        for rows in _chunks(logits.shape[0] if shard.num_real else 0, chunk):
            z = shard.scaled(logits[rows], dtype, temperature)
            p = z.softmax(-1)
            total[rows] = p.sum(-1)
            top[rows] = z.amax(-1)
            log_sum[rows] = -p.amax(-1).log()
            if with_entropy:  # -inf logits have probability 0 and must add 0, not 0 * inf
                mean[rows] = p.mul_((z - top[rows, None]).clamp_(min=floor)).sum(-1)
        log_sum += total.log()
        highest = top.clone()
        shard.reduce(highest, dist.ReduceOp.MAX)
        below = (top - highest).clamp_(min=floor)
        weight = (below + log_sum).exp_()
        ahead = torch.where(here, chosen - highest, 0.0)
        sums = torch.stack([ahead, weight, weight * (below + mean / total)])
        shard.reduce(sums, dist.ReduceOp.SUM)
        log_z = sums[1].log()  # of all shards, less `highest`
        entropies = log_z - sums[2] / sums[1] if with_entropy else None
        share = (below + log_sum - log_z).exp_() / total  # makes this shard's softmax the whole vocabulary's
        ctx.save_for_backward(logits, targets, highest, log_z, share, entropies)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        ctx.set_materialize_grads(False)  # an output that nobody used costs nothing in backward
        return sums[0] - log_z, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 6
        logits, targets, highest, log_z, share, entropies = ctx.saved_tensors
        shard: _Shard = ctx.shard
        column, here = shard.local(targets)
        of_logprobs = torch.zeros_like(log_z) if grad_logprobs is None else grad_logprobs / ctx.temperature
        of_entropies = None if grad_entropies is None else grad_entropies / ctx.temperature
        at_target, everywhere = torch.where(here, of_logprobs, 0.0), -(share * of_logprobs)
        gradient = torch.zeros_like(logits) if shard.num_real < shard.columns else torch.empty_like(logits)
        for rows in _chunks(logits.shape[0] if shard.num_real else 0, ctx.chunk):
            z = shard.scaled(logits[rows], log_z.dtype, ctx.temperature)
            p = z.softmax(-1)
            if of_entropies is None:
                g = p.mul_(everywhere[rows, None])
            else:
                p.mul_(share[rows, None])
                surprise = (z - highest[rows, None]).sub_(log_z[rows, None])
                surprise.clamp_(min=torch.finfo(log_z.dtype).min)
                g = surprise.add_(entropies[rows, None]).mul_(p).mul_(-of_entropies[rows, None])
                g.sub_(p.mul_(of_logprobs[rows, None]))
            g.scatter_add_(-1, column[rows, None], at_target[rows, None])
            gradient[rows, : shard.num_real] = g
        return gradient, None, None, None, None, None


def _chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
