"""Zeros where a mask is False, so that NaN, infinity and garbage there have no effect."""

from nemo_grpo.core.lazy import Tensor, torch


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask`` is True, exactly 0 elsewhere; the gradient likewise. A product would keep NaN.

    Args:    x: [..., T] floating point.  mask: bool, of x's shape.
    Returns: of x's shape and dtype.
    """
    return torch.where(mask, x, x.new_zeros(()))
