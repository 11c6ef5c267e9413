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

_CHUNK_LOGITS = {"cpu": 2**17, "cuda": 2**25}
"""Logits per chunk, by device.

A CPU's allocator returns large blocks to the system, so every new one costs page faults. A GPU launches a
dozen kernels per chunk, and each must have more to do than a launch takes."""


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

    Args:
        logits: [..., V] of any floating dtype; under ``group`` this rank's columns of the vocabulary.
        targets: [...] int64, global token ids; column t is the token that logits t predict. Where it is
            `IGNORED` the logprob is 0 without gradient; the entropy is that of the distribution.
        temperature: > 0.
        chunk_size: tokens per fp32 chunk, default `_CHUNK_LOGITS` / V. The memory of about 4 chunks is used.
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
        chunk_logits = _CHUNK_LOGITS.get(logits.device.type, _CHUNK_LOGITS["cuda"])
        chunk_size = max(1, chunk_logits // vocab)
    if temperature <= 0 or chunk_size <= 0:
        raise ValueError(f"temperature={temperature} and chunk_size={chunk_size} must be positive")
    shard = _Shard(group, vocab, vocab_size)
    is_counted = targets != IGNORED
    is_token = (targets >= 0) & (targets < shard.num_tokens)
    rule = f"a target is 0 to {shard.num_tokens - 1}, or {IGNORED} to ignore the position"
    require(is_token | ~is_counted, targets, "targets", rule)
    flat = logits.reshape(-1, vocab)
    logprobs, entropies = _ChunkedLogprobs.apply(
        flat, targets.reshape(-1), temperature, chunk_size, shard, with_entropy
    )
    logprobs = torch.where(is_counted, logprobs.view(targets.shape), 0.0)
    if not with_entropy:
        return logprobs, None
    return logprobs, entropies.view(targets.shape)


class _Shard:
    """This rank's part of the vocabulary, and the sums over the ranks.

    Attributes:
        group: the ranks that share the vocabulary; None: this rank has all of it.
        first: token id of the first column.
        columns: columns of this rank, padding included.
        num_real: columns of this rank that are tokens and no padding; they come first.
        num_tokens: tokens of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, columns: int, vocab_size: int | None) -> None:
        self.group = group
        self.first = 0
        num_columns = columns
        if group is not None and group.size() > 1:
            self.first = group.rank() * columns
            num_columns = group.size() * columns
        else:
            self.group = None
        self.columns = columns
        if vocab_size is None:
            self.num_real = columns
            self.num_tokens = num_columns
        else:
            # Megatron pads the vocabulary at its end, so the last ranks may hold padding alone.
            self.num_real = min(max(vocab_size - self.first, 0), columns)
            self.num_tokens = min(vocab_size, num_columns)

    def scaled(self, logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
        """Return a chunk's logits of real tokens in the accumulation dtype; may be a view of ``logits``."""
        z = logits[:, : self.num_real].to(dtype)
        if temperature != 1:
            z = z / temperature
        if self.group is not None:
            # The softmax of only -inf is NaN, and a shard may hold nothing else.
            z = z.clamp(min=torch.finfo(dtype).min)
        return z

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column of each target in this shard, True where the shard has that column).

        The columns of other shards' targets are clamped to valid ones, so that they can be gathered.
        """
        column = targets - self.first
        is_local = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(self.num_real, 1) - 1), is_local

    def reduce(self, x: Tensor, op: Any) -> None:
        """Reduce over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)


class _ChunkedLogprobs(torch.autograd.Function):
    """[N, V] logits, [N] targets -> [N] logprobs, [N] entropies (None without ``with_entropy``).

    The softmax of a shard's columns is rescaled to the whole vocabulary. For a token, z the shard's logits:

        top = max z,   log_sum = log sum exp(z - top)         this shard's
        highest = max of top over the shards
        below = top - highest,   weight = exp(below + log_sum)
        log_z = log(sum of the shards' weights)               so that lse = highest + log_z
        logp  = (z_y - highest) - log_z
        H     = log_z - E[z - highest]

    The operations on a chunk work in place, because on a CPU each new [chunk, V] block costs page faults:
    logprobs of 512 tokens with 49,152 logits each, forward and backward, take 101 ms so and 111 ms otherwise.
    """

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
        column, is_local = shard.local(targets)
        target_logits = logits.gather(-1, column[:, None])[:, 0].to(dtype) / temperature
        floor = torch.finfo(dtype).min
        top = torch.full_like(target_logits, floor)  # this shard's highest logit
        log_sum = torch.zeros_like(target_logits)  # log sum exp(z - top)
        total = torch.ones_like(target_logits)  # sum of softmax's probabilities, 1 but for rounding
        mean = torch.zeros_like(target_logits)  # expectation of z - top over this shard
        # A shard of padding alone has no real columns; its numbers stay those that add nothing.
        for rows in _chunks(logits.shape[0] if shard.num_real else 0, chunk):
            z = shard.scaled(logits[rows], dtype, temperature)
            p = z.softmax(-1)
            total[rows] = p.sum(-1)
            top[rows] = z.amax(-1)
            # The largest probability is 1 / sum exp(z - top), so no second pass over z is needed.
            log_sum[rows] = -p.amax(-1).log()
            if with_entropy:
                # -inf logits have probability 0 and must add 0, not 0 * inf.
                distance = (z - top[rows, None]).clamp_(min=floor)
                mean[rows] = p.mul_(distance).sum(-1)
        log_sum += total.log()
        highest = top.clone()
        shard.reduce(highest, dist.ReduceOp.MAX)
        below = (top - highest).clamp(min=floor)
        weight = (below + log_sum).exp()
        target_distance = torch.where(is_local, target_logits - highest, 0.0)
        # One exchange for all three sums.
        sums = torch.stack([target_distance, weight, weight * (below + mean / total)])
        shard.reduce(sums, dist.ReduceOp.SUM)
        log_z = sums[1].log()  # of all shards, less `highest`
        entropies = None
        if with_entropy:
            entropies = log_z - sums[2] / sums[1]
        # Factor that makes this shard's softmax the whole vocabulary's.
        share = (below + log_sum - log_z).exp() / total
        ctx.save_for_backward(logits, targets, highest, log_z, share, entropies)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.shard = shard
        ctx.set_materialize_grads(False)  # an output that nobody used costs nothing in backward
        return sums[0] - log_z, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute d logp / d z = 1[v=y] - p  and  d H / d z = -p (log p + H), chunk by chunk."""
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 6
        logits, targets, highest, log_z, share, entropies = ctx.saved_tensors
        shard: _Shard = ctx.shard
        column, is_local = shard.local(targets)
        # z = logits / temperature, so d z / d logits is 1 / temperature.
        if grad_logprobs is None:
            scaled_grad_logprobs = torch.zeros_like(log_z)
        else:
            scaled_grad_logprobs = grad_logprobs / ctx.temperature
        scaled_grad_entropies = None if grad_entropies is None else grad_entropies / ctx.temperature
        # d logp / d z has two parts: 1 at the target's column, and -p at every column.
        at_target = torch.where(is_local, scaled_grad_logprobs, 0.0)
        everywhere = -(share * scaled_grad_logprobs)
        # Padding columns get no gradient below, so they must start at 0; else every column is written.
        gradient = torch.zeros_like(logits) if shard.num_real < shard.columns else torch.empty_like(logits)
        for rows in _chunks(logits.shape[0] if shard.num_real else 0, ctx.chunk):
            z = shard.scaled(logits[rows], log_z.dtype, ctx.temperature)
            p = z.softmax(-1)
            if scaled_grad_entropies is None:
                g = p.mul_(everywhere[rows, None])
            else:
                p.mul_(share[rows, None])
                log_p = (z - highest[rows, None]).sub_(log_z[rows, None])
                log_p.clamp_(min=torch.finfo(log_z.dtype).min)  # p log p is 0 where p is 0, and not NaN
                g = log_p.add_(entropies[rows, None]).mul_(p).mul_(-scaled_grad_entropies[rows, None])
                g.sub_(p.mul_(scaled_grad_logprobs[rows, None]))
            g.scatter_add_(-1, column[rows, None], at_target[rows, None])
            gradient[rows, : shard.num_real] = g
        return gradient, None, None, None, None, None


def _chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
