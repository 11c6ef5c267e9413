"""Output layer and loss, with the logits of only a few tokens in memory at a time.

A token has a logit for each token of the vocabulary, and the logits' gradient is as large. For a whole
microbatch both would take most of a small model's memory for activations. Here the rows of a microbatch go
through the output layer in parts. The loss and the gradient of a part are computed before the next part's
logits; only the gradients of the hidden states and of the weight remain. This needs no additional matrix
products, with one exception: a part of more than ``max_tokens`` tokens, which is one long sequence, is split
into pieces, and its logits are computed a second time when the gradient of its logprobs is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TokenScores = tuple[Tensor, Tensor | None]
"""Logprobs of some tokens, and their entropies, without gradient, or None."""

ScoreTokens = Callable[[Tensor, slice], TokenScores]
"""Function that computes `TokenScores`, [n] each, from logits [n, V] and the place of their tokens."""

LossOfScores = Callable[[Tensor, Tensor | None], Tensor]
"""Function that computes a part's share of the loss, 0-d, from logprobs and entropies."""

PartLoss = tuple[slice, LossOfScores]
"""Tokens of a part, and the function that computes its loss from their scores."""


_CHUNK_ROWS = 8192
"""Number of rows in a chunk when 16-bit products are accumulated in FP32."""


def loss_in_parts(
    hidden: Tensor, weight: Tensor, parts: Sequence[PartLoss], score: ScoreTokens, max_tokens: int
) -> Tensor:
    """Sum the losses of all parts. If gradients are enabled, they are computed in the same pass.

    Args:
        hidden: Hidden states [N, h].
        weight: Weight [V, h] of the output layer; under tensor parallelism this rank's rows.
        parts: Consecutive parts of the N tokens, with the loss of each.
        score: Function that computes logprobs and entropies from logits.
        max_tokens: Largest number of tokens that ``score`` is called with.

    Returns:
        The loss, 0-d. Its backward pass can run only once.
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
    """Compute the scores of a part's tokens piece by piece, without a graph for gradients."""
    pieces = _pieces(tokens, max_tokens)
    with torch.no_grad():
        scores = [score(hidden[piece] @ weight.T, piece) for piece in pieces]
    logprobs = torch.cat([piece_logprobs for piece_logprobs, _ in scores])
    entropies = [piece_entropies for _, piece_entropies in scores if piece_entropies is not None]
    return logprobs, torch.cat(entropies) if entropies else None


def _pieces(tokens: slice, max_tokens: int) -> list[slice]:
    """Split a part at every ``max_tokens`` tokens."""
    # A part may have no tokens on a context-parallel rank. It becomes one empty piece, because its loss must
    # still be computed.
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
                # Free these logits before the next part's are computed, so that both are never in memory.
                del logits, logprobs
            else:
                # The loss of a long part needs all of its logprobs, whose logits do not fit into memory. So
                # the logprobs are computed first, and each piece's logits again for the gradient.
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
        # The stored gradients are scaled in place, so a second backward pass would be wrong; without them it
        # fails.
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
    """Sum of matrix products. Several products of 16-bit matrices are summed in FP32.

    A sum in 16 bits would round after every product, so it would depend on how the rows are split.

    Attributes:
        total: The sum; None before the first product, unless the sum is in FP32.
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
            # The product is added in chunks, because a whole one would be as large as the weight.
            for total_chunk, a_chunk in zip(self.total.split(_CHUNK_ROWS), a.split(_CHUNK_ROWS), strict=True):
                total_chunk += a_chunk @ b
