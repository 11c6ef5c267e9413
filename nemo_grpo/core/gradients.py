"""Operations with a gradient of their own: the same derivative, in one pass over memory.

First derivatives only: they are constants to whoever differentiates them again. Imported where they are used,
because the class statements need torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep(x: Tensor, bits: Tensor) -> Tensor:
    """``x`` where all bits of the integers ``bits`` are set, exactly 0 where none is."""
    return (x.detach().view(bits.dtype) & bits).view(x.dtype)


class Keep(torch.autograd.Function):
    """`keep`; the gradient is masked alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return keep(x, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return keep(gradients[0].contiguous(), bits), None


class Clipped(torch.autograd.Function):
    """(value, 1 where the clip took the gradient and else 0).

    The gradient in the ratio is A where the unclipped product was taken, else 0; none in A.
    """

    @staticmethod
    def forward(
        ctx: Any, ratio: Tensor, advantages: Tensor, clip_min: float, clip_max: float, clip_c: float | None
    ) -> tuple[Tensor, Tensor]:
        free = ratio * advantages
        value = torch.minimum(free, ratio.clamp(1 - clip_min, 1 + clip_max).mul_(advantages))
        if clip_c is not None:  # the right side is 0 where A >= 0, and the value is not below 0 there
            value = torch.maximum(value, advantages.clamp(max=0).mul_(clip_c))
        is_clipped = (value != free).to(ratio.dtype)
        ctx.save_for_backward(torch.addcmul(advantages, is_clipped, advantages, value=-1))
        ctx.mark_non_differentiable(is_clipped)
        ctx.set_materialize_grads(False)
        return value, is_clipped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        value = gradients[0]  # None where no gradient comes back; the other output never has one
        return None if value is None else value * slope, None, None, None, None


class ExcessOfExp(torch.autograd.Function):
    """exp(x) - 1 - x, whose gradient is exp(x) - 1; accurate near 0, where the sum would cancel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = torch.expm1(x)
        ctx.save_for_backward(slope)
        return slope - x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradients[0] * slope


class WithScoreFunction(torch.autograd.Function):
    """``x``, whose gradient in the logprobs is x besides its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradients[0], gradients[0] * x
