"""Output layer and loss, with the logits of a few tokens in memory at a time.

A token has as many logits as the vocabulary has tokens, and their gradient is as large: for a whole
microbatch they would be most of a small model's activations. Here the rows of a microbatch go through the
output layer in parts. A part's loss and gradient are computed before the next part's logits, and leave only
the gradients of the hidden states and of the weight. This takes no further matrix products, except for a part
(one long sequence) of more than ``most`` tokens, whose logits are computed again, piece by piece, once the
gradient of its logprobs is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = tuple[Tensor, Tensor | None]
"""(logprobs, entropies without gradient or None) of some tokens."""

NumbersOf = Callable[[Tensor, slice], Numbers]
"""(logits [n, V], their tokens) -> `Numbers`, [n] each."""

PartLoss = tuple[slice, Callable[[Tensor, Tensor | None], Tensor]]
"""(tokens, their `Numbers` -> 0-d share of the loss)."""


_ROWS = 8192
"""Rows per chunk when 16-bit products are accumulated in FP32."""


def loss_in_parts(
    hidden: Tensor, weight: Tensor, parts: Sequence[PartLoss], numbers: NumbersOf, most: int
) -> Tensor:
    """Sum the parts' losses and, unless gradients are disabled, compute the gradient along with them.

    Args:    hidden: [N, h].  weight: [V, h], of the output layer; under tensor parallelism this rank's rows.
             parts: consecutive tokens; together all N.
             numbers: called for at most ``most`` tokens at a time.
    Returns: 0-d; backward can be called once.
    """
    if torch.is_grad_enabled():
        total: Tensor = _LossInParts.apply(hidden, weight, parts, numbers, most)
        return total
    losses = [loss(*_without_gradient(hidden, weight, where, numbers, most)) for where, loss in parts]
    return torch.stack(losses).sum()


def _without_gradient(hidden: Tensor, weight: Tensor, where: slice, numbers: NumbersOf, most: int) -> Numbers:
    with torch.no_grad():
        found = [numbers(hidden[piece] @ weight.T, piece) for piece in _pieces(where, most)]
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), None if entropies[0] is None else torch.cat(entropies)


def _pieces(where: slice, most: int) -> list[slice]:
    """Split a part at every ``most`` tokens; without tokens (on a context-parallel rank), one empty piece."""
    last = max(where.stop, where.start + 1)
    return [slice(start, min(start + most, where.stop)) for start in range(where.start, last, most)]


class _LossInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, parts: Sequence[PartLoss], numbers: NumbersOf, most: int
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden)
        number = sum(len(_pieces(where, most)) for where, _ in parts)
        of_weight = _Products(weight, number) if ctx.needs_input_grad[1] else None
        losses = []

        def backward(piece: slice, logits: Tensor, logprobs: Tensor, gradient: Tensor) -> None:
            (of_logits,) = torch.autograd.grad(logprobs, logits, gradient)
            of_hidden[piece] = of_logits @ weight
            if of_weight is not None:
                of_weight.add(of_logits.T, hidden[piece])

        def forward(piece: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            logits = (hidden[piece] @ weight.T).requires_grad_()
            with torch.enable_grad():
                return logits, *numbers(logits, piece)

        for where, loss in parts:
            if where.stop - where.start <= most:
                logits, logprobs, entropies = forward(where)
                value, gradient = _loss_and_gradient(loss, logprobs.detach(), entropies)
                backward(where, logits, logprobs, gradient)
                del logits, logprobs  # before the next part's are made
            else:
                found = _without_gradient(hidden, weight, where, numbers, most)
                value, gradient = _loss_and_gradient(loss, *found)
                for piece in _pieces(where, most):
                    own = slice(piece.start - where.start, piece.stop - where.start)
                    backward(piece, *forward(piece)[:2], gradient[own])
            losses.append(value)
        ctx.gradients = of_hidden, of_weight and of_weight.total
        ctx.dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.gradients
        del ctx.gradients  # they are scaled in place
        if of_weight is not None:
            of_weight = of_weight.mul_(gradient).to(ctx.dtype)
        return of_hidden.mul_(gradient), of_weight, None, None, None


def _loss_and_gradient(
    loss: Callable[[Tensor, Tensor | None], Tensor], logprobs: Tensor, entropies: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        value = loss(logprobs.requires_grad_(), entropies)
        (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient


class _Products:
    """Sum of matrix products shaped like ``like``; in FP32 if several products are of 16-bit matrices."""

    def __init__(self, like: Tensor, number: int) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        in_fp32 = number > 1 and dtype != like.dtype
        self.total = torch.zeros_like(like, dtype=dtype) if in_fp32 else None

    def add(self, a: Tensor, b: Tensor) -> None:
        if self.total is None:
            self.total = a @ b
        elif self.total.dtype == a.dtype:
            self.total.addmm_(a, b)
        else:
            for some, rows in zip(self.total.split(_ROWS), a.split(_ROWS), strict=True):
                some += rows @ b
