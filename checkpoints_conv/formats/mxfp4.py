"""Matrices in MXFP4, as gpt-oss is published: blocks of 32 numbers of 4 bits, each with a power of two.

For E experts [out, in] the file has blocks [E, out, in / 32, 16] and scales [E, out, in / 32], both uint8; a
byte's lower half comes first. (Open Compute Project, Microscaling Formats, version 1.0.) transformers decodes
them to [E, in, out].
"""

from nemo_grpo.core.lazy import Tensor, torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names behind the matrix's."""
BLOCK_BYTES = 16
NUM_PER_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def decoded_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """[E, in, out]; None if these are no blocks and their scales."""
    if len(blocks) != 4 or blocks[3] != BLOCK_BYTES or blocks[:3] != scales:
        return None
    return blocks[0], blocks[2] * NUM_PER_BLOCK, blocks[1]


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """One expert: w_ij = number_ij x 2 ** (scale of its block - 127), which bfloat16 holds exactly.

    Args:    blocks: [out, in / 32, 16] uint8.  scales: [out, in / 32] uint8.
    Returns: [in, out] bfloat16.
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [out, in / 32, 32]
    values = torch.ldexp(numbers[halves.int()], scales[..., None].int() - _BIAS)
    return values.flatten(1).t().contiguous().bfloat16()
