"""Rotary position embeddings with a backward pass of their own, in the place of megatron-core's plain ones.

Those take cosines and sines of the same angles anew in every layer, for queries and for keys, and autograd
keeps what it needs of each operation.
"""

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

_plain = rope_utils._apply_rotary_pos_emb_bshd


def install() -> None:
    """Make megatron-core use `rotate` where it would use its plain embeddings; fused kernels stay."""
    rope_utils._apply_rotary_pos_emb_bshd = rotate


def rotate(heads: Tensor, angles: Tensor, *flags: Any, mscale: float = 1.0, **options: Any) -> Tensor:
    """Turn every head by its token's angles: x cos + (-x2, x1) sin, with x = (x1, x2) in halves.

    Args:    heads: [S, B, H, D].  angles: [S, 1, 1, D] radians, equal in both halves.
             flags, mscale, options: megatron-core's own; what they ask for is left to its function.
    Returns: [S, B, H, D] in the dtype of ``heads``.
    """
    if any((*flags, *options.values())) or mscale != 1 or angles.shape[-1] != heads.shape[-1]:
        plain: Tensor = _plain(heads, angles, *flags, mscale=mscale, **options)
        return plain
    turned: Tensor = _Rotate.apply(heads, *_cos_and_signed_sin(angles, heads.dtype))
    return turned


@functools.lru_cache(maxsize=1)  # by identity: all layers of a forward pass have the same tensor
def _cos_and_signed_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sin = angles.sin()
    sin[..., : sin.shape[-1] // 2].neg_()
    return angles.cos().to(dtype), sin.to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, signed_sin = ctx.saved_tensors
        swapped = gradient.roll(gradient.shape[-1] // 2, -1)
        return torch.addcmul(gradient * cos, swapped, signed_sin, value=-1), None, None
