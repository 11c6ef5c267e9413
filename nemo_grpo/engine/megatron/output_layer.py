"""Output layer and loss, with the logits of a few tokens in memory at a time.

A token has as many logits as the vocabulary has tokens, and their gradient is as large: for a whole
microbatch they would be most of a small model's activations. Here the rows of a microbatch go through the
output layer in parts. A part's loss and gradient are computed before the next part's logits, and leave only
the gradients of the hidden states and of the weight. This takes no further matrix products, except for a part
(one long sequence) of more than ``max_tokens`` tokens, whose logits are computed again, piece by piece, once
the gradient of its logprobs is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TokenScores = tuple[Tensor, Tensor | None]
"""(logprobs, entropies without gradient or None) of some tokens."""

ScoreTokens = Callable[[Tensor, slice], TokenScores]
"""(logits [n, V], their tokens) -> `TokenScores`, [n] each."""

LossOfScores = Callable[[Tensor, Tensor | None], Tensor]
"""`TokenScores` -> 0-d share of the loss."""

PartLoss = tuple[slice, LossOfScores]
"""(tokens of a part, loss of their scores)."""


_CHUNK_ROWS = 8192
"""Rows per chunk when 16-bit products are accumulated in FP32."""


def loss_in_parts(
    hidden: Tensor, weight: Tensor, parts: Sequence[PartLoss], score: ScoreTokens, max_tokens: int
) -> Tensor:
    """Sum the parts' losses and, unless gradients are disabled, compute the gradient along with them.

    Args:
        hidden: [N, h].
        weight: [V, h], of the output layer; under tensor parallelism this rank's rows.
        parts: consecutive tokens; together all N.
        score: computes logprobs and entropies; called for at most ``max_tokens`` tokens at a time.

    Returns:
        0-d; backward can be called once.
    """
    if torch.is_grad_enabled():
        total: Tensor = _LossInParts.apply(hidden, weight, parts, score, max_tokens)
        return total
    losses = []
    for tokens, loss in parts:
        logprobs, entropies = _scores_without_gradient(hidden, weight, tokens, score, max_tokens)
        losses.append(loss(logprobs, entropies))
    return torch.stack(losses).sum()


def _scores_without_gradient(
    hidden: Tensor, weight: Tensor, tokens: slice, score: ScoreTokens, max_tokens: int
) -> TokenScores:
    """Score a part's tokens piece by piece."""
    pieces = _pieces(tokens, max_tokens)
    with torch.no_grad():
        scores = [score(hidden[piece] @ weight.T, piece) for piece in pieces]
    logprobs = torch.cat([piece_logprobs for piece_logprobs, _ in scores])
    entropies = [piece_entropies for _, piece_entropies in scores if piece_entropies is not None]
    return logprobs, torch.cat(entropies) if entropies else None


def _pieces(tokens: slice, max_tokens: int) -> list[slice]:
    """Split a part at every ``max_tokens`` tokens."""
    # A part without tokens (on a context-parallel rank) is one empty piece: its loss must still be computed.
    last = max(tokens.stop, tokens.start + 1)
    starts = range(tokens.start, last, max_tokens)
    return [slice(start, min(start + max_tokens, tokens.stop)) for start in starts]


class _LossInParts(torch.autograd.Function):
    """Sum of the parts' losses, whose gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        parts: Sequence[PartLoss],
        score: ScoreTokens,
        max_tokens: int,
    ) -> Tensor:
        hidden_gradient = torch.empty_like(hidden)
        num_products = sum(len(_pieces(tokens, max_tokens)) for tokens, _ in parts)
        weight_gradient = _SumOfProducts(weight, num_products) if ctx.needs_input_grad[1] else None
        losses = []

        def forward(piece: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            """Compute a piece's logits and scores, with their graph."""
            logits = (hidden[piece] @ weight.T).requires_grad_()
            with torch.enable_grad():
                logprobs, entropies = score(logits, piece)
            return logits, logprobs, entropies

        def backward(piece: slice, logits: Tensor, logprobs: Tensor, gradient: Tensor) -> None:
            """Add a piece's share of the gradients, from the gradient of its logprobs."""
            (logits_gradient,) = torch.autograd.grad(logprobs, logits, gradient)
            hidden_gradient[piece] = logits_gradient @ weight
            if weight_gradient is not None:
                weight_gradient.add(logits_gradient.T, hidden[piece])

        for tokens, loss in parts:
            if tokens.stop - tokens.start <= max_tokens:
                logits, logprobs, entropies = forward(tokens)
                value, gradient = _loss_and_gradient(loss, logprobs.detach(), entropies)
                backward(tokens, logits, logprobs, gradient)
                # Freed before the next part's logits are computed, or both would be in memory.
                del logits, logprobs
            else:
                logprobs, entropies = _scores_without_gradient(hidden, weight, tokens, score, max_tokens)
                value, gradient = _loss_and_gradient(loss, logprobs, entropies)
                for piece in _pieces(tokens, max_tokens):
                    piece_of_part = slice(piece.start - tokens.start, piece.stop - tokens.start)
                    logits, logprobs, _ = forward(piece)
                    backward(piece, logits, logprobs, gradient[piece_of_part])
                    del logits, logprobs
            losses.append(value)
        ctx.hidden_gradient = hidden_gradient
        ctx.weight_gradient = None if weight_gradient is None else weight_gradient.total
        ctx.dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place, so they serve only once.
        hidden_gradient = ctx.hidden_gradient
        weight_gradient = ctx.weight_gradient
        del ctx.hidden_gradient, ctx.weight_gradient
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(gradient).to(ctx.dtype)
        return hidden_gradient.mul_(gradient), weight_gradient, None, None, None


def _loss_and_gradient(
    loss: LossOfScores, logprobs: Tensor, entropies: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a part's loss, and its gradient with respect to the logprobs."""
    with torch.enable_grad():
        value = loss(logprobs.requires_grad_(), entropies)
        (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient


class _SumOfProducts:
    """Sum of matrix products shaped like ``like``; in FP32 if several products are of 16-bit matrices.

    A sum in 16 bits would round after every product, so it would depend on how the rows are split.
    """

    def __init__(self, like: Tensor, num_products: int) -> None:
        sum_dtype = torch.promote_types(like.dtype, torch.float32)
        in_fp32 = num_products > 1 and sum_dtype != like.dtype
        self.total = torch.zeros_like(like, dtype=sum_dtype) if in_fp32 else None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the product a @ b."""
        if self.total is None:
            self.total = a @ b
        elif self.total.dtype == a.dtype:
            self.total.addmm_(a, b)
        else:
            # In chunks: a whole product in 16 bits beside the sum would be as large as the weight.
            for total_chunk, a_chunk in zip(self.total.split(_CHUNK_ROWS), a.split(_CHUNK_ROWS), strict=True):
                total_chunk += a_chunk @ b
