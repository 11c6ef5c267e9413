"""Rotary position embeddings without Transformer Engine, where megatron-core asks for a fused kernel.

megatron-core's plain ones take cosines and sines of the same angles anew in every layer, for queries and for
keys, and autograd keeps what it needs of each operation.
"""

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def install() -> bool:
    """Make megatron-core's ``apply_rope_fusion`` work; True if it uses `rotate` then."""
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate
    return rope_utils.fused_apply_rotary_pos_emb is rotate


def rotate(heads: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Turn every head by its token's angles: x cos + (-x2, x1) sin, with x = (x1, x2) in halves.

    Args:    heads: [S, B, H, D].  angles: [S, 1, 1, D] radians, equal in both halves.
    Returns: [S, B, H, D] in the dtype of ``heads``.
    """
    assert not interleaved, "of the embedded engine's families none interleaves"
    assert angles.shape[-1] == heads.shape[-1], (angles.shape, heads.shape)
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
