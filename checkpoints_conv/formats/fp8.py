"""FP8 matrices with one scale per block, as DeepSeek-V3 is published: ``weight``, ``weight_scale_inv``."""

from nemo_grpo.core.lazy import Tensor, torch

BLOCK = 128
"""Rows and columns of a block."""
SCALE = "_scale_inv"
"""Suffix of the scales' name behind the matrix's."""


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix's scales."""
    return tuple(-(-size // BLOCK) for size in shape)


def decode(codes: Tensor, scales: Tensor, first: int) -> Tensor:
    """Rows of a matrix: w_ij = code_ij x scale of its block, in float32, rounded once.

    Args:    codes: [R, C] float8_e4m3fn, of which row 0 is the matrix's row ``first``.
             scales: of the blocks from that row's on, [blocks, ceil(C / 128)].
    Returns: [R, C] bfloat16.
    """
    rows = torch.arange(first, first + len(codes)) // BLOCK - first // BLOCK
    wide = scales.float()[rows].repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.float() * wide).bfloat16()
