"""Dtypes of stored tensors, described without importing torch, which takes seconds; and block-scaled formats.

FP8 as of DeepSeek-V3: ``weight`` and one scale per block, ``weight_scale_inv``; blocks are 128 x 128 or as
config.json says.

MXFP4 (Open Compute Project, Microscaling Formats, version 1.0) as of gpt-oss: blocks of 32 numbers of 4 bits,
each with a power of two. For E experts [out, in] the file has blocks [E, out, in / 32, 16] and scales
[E, out, in / 32], both uint8; a byte's lower half comes first. transformers decodes them to [E, in, out].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.support.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Dtype:
    """One dtype.

    Attributes:
        name: torch's name.
        itemsize: bytes of a number.
        safetensors: name in safetensors files; "": there is none.
        storage: class of its storages in torch.save archives; "": there is none.
    """

    name: str
    itemsize: int
    safetensors: str = ""
    storage: str = ""

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def torch(self) -> torch.dtype:
        torch_dtype: Any = getattr(torch, self.name)
        return torch_dtype


_ALL_DTYPES = (
    Dtype("float64", 8, "F64", "DoubleStorage"), Dtype("float32", 4, "F32", "FloatStorage"),
    Dtype("float16", 2, "F16", "HalfStorage"), Dtype("bfloat16", 2, "BF16", "BFloat16Storage"),
    Dtype("int64", 8, "I64", "LongStorage"), Dtype("int32", 4, "I32", "IntStorage"),
    Dtype("int16", 2, "I16", "ShortStorage"), Dtype("int8", 1, "I8", "CharStorage"),
    Dtype("uint8", 1, "U8", "ByteStorage"), Dtype("bool", 1, "BOOL", "BoolStorage"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"), Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"), Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    Dtype("float8_e8m0fnu", 1, "F8_E8M0"),
    Dtype("uint16", 2, "U16"), Dtype("uint32", 4, "U32"), Dtype("uint64", 8, "U64"),
    Dtype("complex32", 4), Dtype("complex64", 8, "C64"), Dtype("complex128", 16),
)  # fmt: skip
DTYPES = {dtype.name: dtype for dtype in _ALL_DTYPES}
WEIGHT_DTYPES = tuple(DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64"))
"""Dtypes of weights that are converted."""
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80 << 16, "float64": 0x7FF << 52}
"""Bits of the exponent, all set."""
_OPTIONS = {"bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"], "fp32": DTYPES["float32"]}
"""Values of ``--dtype``."""

FP8_BLOCK = (128, 128)
"""Rows and columns of a block, unless config.json says others."""
SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
"""safetensors' names of dtypes of which several numbers share a byte."""
FP8_SCALE = "_scale_inv"
"""Ending of the name of an FP8 matrix's scales, after the matrix's name."""
MXFP4_BLOCKS = "_blocks"
"""Ending of the name of an MXFP4 matrix's numbers."""
MXFP4_SCALES = "_scales"
"""Ending of the name of an MXFP4 matrix's scales."""
MXFP4_BYTES = 16
"""Bytes of an MXFP4 block, without its scale."""
_NUM_PER_BLOCK = 32
"""Number of values in an MXFP4 block."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the 4-bit codes; the highest bit is the sign."""
_BIAS = 127
"""Bias of the scales, which are powers of two stored as their exponents."""


def dtype_for(choice: str | torch.dtype | None) -> Dtype | None:
    """Read a ``--dtype`` value, or torch's dtype; None keeps what is stored."""
    if choice is None:
        return None
    dtypes_by_name = dict(_OPTIONS)
    for dtype in WEIGHT_DTYPES:
        dtypes_by_name[dtype.name] = dtype
        dtypes_by_name[str(dtype)] = dtype
    name = str(choice)
    if name not in dtypes_by_name:
        raise UserError(f"--dtype {name!r} is not known{did_you_mean(name, _OPTIONS)}")
    return dtypes_by_name[name]


def widened(dtype: Dtype) -> Dtype:
    """Return the next wider dtype: float32 for 16 bits, float64 for float32."""
    return DTYPES["float64"] if dtype.itemsize > 2 else DTYPES["float32"]


def narrowed(dtype: Dtype, main: Dtype) -> Dtype:
    """Undo `widened`.

    Args:
        dtype: dtype of the widened tensor.
        main: dtype of the other weights, which tells bfloat16 from float16.
    """
    if dtype == main:
        # Another program wrote the checkpoint, and widened nothing.
        return dtype
    return main if widened(main) == dtype else DTYPES["float32"]


def cast(data: memoryview, stored: Dtype, dtype: Dtype, name: str) -> memoryview:
    """Convert numbers to another dtype. If they have it already, the same memory is returned."""
    if stored == dtype:
        # Here and not in `cast_tensor`: bytes that stay as they are need no import of torch.
        return data
    return byte_view(cast_tensor(tensor_of(data, stored), dtype, name))


def cast_tensor(tensor: Tensor, dtype: Dtype, name: str) -> Tensor:
    """Convert a tensor to another dtype.

    Args: name: the tensor's name, for messages.
    """
    if tensor.dtype == dtype.torch:
        return tensor
    result = tensor.to(dtype.torch)
    # Infinities of the source are no overflow.
    if dtype.name == "float16" and bool((result.isinf() & tensor.isfinite()).any()):
        raise UserError(f"{name} has values beyond fp16's range (65504); use --dtype bf16 or fp32")
    return result


def check_finite(data: memoryview, dtype: Dtype, name: str) -> None:
    """Refuse NaN and infinity: numbers whose exponent's bits are all 1."""
    if dtype.name not in _EXPONENTS:
        return
    # numpy has no bfloat16, but integers show the exponent's bits; importing torch takes seconds.
    import numpy

    exponent = _EXPONENTS[dtype.name]
    bits = numpy.frombuffer(data, f"<u{dtype.itemsize}")
    if ((bits & exponent) == exponent).any():
        raise UserError(f"{name} holds NaN or inf: training has diverged; export an earlier checkpoint")


def tensor_of(data: memoryview | bytearray, dtype: Dtype, shape: Sequence[int] = (-1,)) -> Tensor:
    """View ``data`` as a tensor."""
    if not len(data):
        # torch.frombuffer refuses empty memory.
        return torch.empty(tuple(max(size, 0) for size in shape), dtype=dtype.torch)
    return torch.frombuffer(data, dtype=dtype.torch).view(tuple(shape))


def byte_view(tensor: Tensor) -> memoryview:
    """View a contiguous tensor's memory, for reading and writing."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def main_dtype(tensors: Iterable[tuple[str, Dtype, Sequence[int]]]) -> Dtype:
    """Find the dtype of most bytes, which config.json states for the whole model.

    Args: tensors: name, dtype and shape of each.
    """
    num_bytes: Counter[Dtype] = Counter()
    for _, dtype, shape in tensors:
        num_bytes[dtype] += num_bytes_of(dtype, shape)
    return max(num_bytes, key=num_bytes.__getitem__)


def num_bytes_of(dtype: Dtype, shape: Sequence[int]) -> int:
    """Compute the size of a tensor's data."""
    return math.prod(shape) * dtype.itemsize


def fp8_scales_shape(shape: tuple[int, ...], block: tuple[int, int] = FP8_BLOCK) -> tuple[int, ...]:
    """Return the shape of the scales of an FP8 matrix, which has one scale per block.

    Args:
        shape: the matrix's shape.
        block: rows and columns of a block.
    """
    return tuple(math.ceil(size / width) for size, width in zip(shape, block, strict=False))


def decode_fp8(codes: Tensor, scales: Tensor, first: int, block: tuple[int, int] = FP8_BLOCK) -> Tensor:
    """Decode rows of a matrix: w_ij = code_ij x scale of its block, in float32, rounded once.

    Args:
        codes: [R, C] float8_e4m3fn, of which row 0 is the matrix's row ``first``.
        scales: scales of the blocks from that row's on, [blocks, ceil(C / columns of a block)].
        first: number of the first row.
        block: rows and columns of a block.

    Returns: [R, C] bfloat16.
    """
    block_rows, block_columns = block
    block_of_row = torch.arange(first, first + len(codes)) // block_rows - first // block_rows
    scale_of_number = scales.float()[block_of_row].repeat_interleave(block_columns, 1)[:, : codes.shape[1]]
    return (codes.float() * scale_of_number).bfloat16()


def mxfp4_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape [E, in, out] of the matrices, or None if these are no shapes of blocks and scales."""
    if len(blocks) != 4 or blocks[3] != MXFP4_BYTES or blocks[:3] != scales:
        return None
    return blocks[0], blocks[2] * _NUM_PER_BLOCK, blocks[1]


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode one expert: w_ij = number_ij x 2 ** (scale of its block - 127), exact in bfloat16.

    Args:
        blocks: [out, in / 32, 16] uint8.
        scales: [out, in / 32] uint8.

    Returns: [in, out] bfloat16.
    """
    negative = tuple(-magnitude for magnitude in _MAGNITUDES)
    number_of_code = torch.tensor(_MAGNITUDES + negative)
    lower_half = blocks & 15
    upper_half = blocks >> 4
    codes = torch.stack([lower_half, upper_half], -1).flatten(-2)  # [out, in / 32, 32]
    exponents = scales[..., None].int() - _BIAS
    values = torch.ldexp(number_of_code[codes.int()], exponents)
    return values.flatten(1).t().contiguous().bfloat16()
