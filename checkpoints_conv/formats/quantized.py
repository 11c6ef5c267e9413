"""Matrices whose blocks of numbers share a scale: FP8 as of DeepSeek-V3, MXFP4 as of gpt-oss.

FP8: ``weight`` and one scale per 128 x 128 block, ``weight_scale_inv``.

MXFP4 (Open Compute Project, Microscaling Formats, version 1.0): blocks of 32 numbers of 4 bits, each with a
power of two. For E experts [out, in] the file has blocks [E, out, in / 32, 16] and scales [E, out, in / 32],
both uint8; a byte's lower half comes first. transformers decodes them to [E, in, out].
"""

from nemo_grpo.core.lazy import Tensor, torch

FP8_BLOCK = 128
"""Rows and columns of a block."""
FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of the names behind the matrix's."""
MXFP4_BYTES = 16
"""Size of a block, without its scale."""
_NUM_PER_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def fp8_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix's scales."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def decode_fp8(codes: Tensor, scales: Tensor, first: int) -> Tensor:
    """Decode rows of a matrix: w_ij = code_ij x scale of its block, in float32, rounded once.

    Args:    codes: [R, C] float8_e4m3fn, of which row 0 is the matrix's row ``first``.
             scales: of the blocks from that row's on, [blocks, ceil(C / 128)].
    Returns: [R, C] bfloat16.
    """
    rows = torch.arange(first, first + len(codes)) // FP8_BLOCK - first // FP8_BLOCK
    wide = scales.float()[rows].repeat_interleave(FP8_BLOCK, 1)[:, : codes.shape[1]]
    return (codes.float() * wide).bfloat16()


def mxfp4_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return [E, in, out]; None if these are no blocks and their scales."""
    if len(blocks) != 4 or blocks[3] != MXFP4_BYTES or blocks[:3] != scales:
        return None
    return blocks[0], blocks[2] * _NUM_PER_BLOCK, blocks[1]


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode one expert: w_ij = number_ij x 2 ** (scale of its block - 127), exact in bfloat16.

    Args:    blocks: [out, in / 32, 16] uint8.  scales: [out, in / 32] uint8.
    Returns: [in, out] bfloat16.
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [out, in / 32, 32]
    values = torch.ldexp(numbers[halves.int()], scales[..., None].int() - _BIAS)
    return values.flatten(1).t().contiguous().bfloat16()
