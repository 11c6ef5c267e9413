"""Hugging Face safetensors folders: single tensors read at their place, without mapping files.

The format is a length, a JSON header and the bytes. ``pread`` instead of a memory map keeps the resident
memory small, and the header shows truncated files before anything is converted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.dtypes import (
    DTYPES,
    FP8_BLOCK,
    FP8_SCALE,
    MXFP4_BLOCKS,
    MXFP4_BYTES,
    MXFP4_SCALES,
    SUB_BYTE,
    WEIGHT_DTYPES,
    Dtype,
    byte_view,
    decode_fp8,
    decode_mxfp4,
    fp8_scales_shape,
    mxfp4_shape,
    num_bytes_of,
    tensor_of,
)
from checkpoints_conv.formats.pieces import Buffer, close_all, damaged, open_all, read_into
from nemo_grpo.models.shared_mappings import by_tensor, is_slice, whole_shape
from nemo_grpo.support.errors import UserError, listed, reading
from nemo_grpo.support.model_folder import INDEX, check_weights, weight_files, weight_map

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
"""safetensors' names of dtypes -> dtypes."""
_MAX_HEADER = 100 << 20
"""Bytes of the longest header that is read; the safetensors library's limit is 100 MB."""
_LENGTH_BYTES = 8
"""Bytes before the header, which give its length."""


@dataclass(frozen=True)
class StoredTensor:
    """Place of one tensor in a safetensors file.

    Attributes:
        file: file that holds the tensor.
        dtype: dtype in which the tensor is read.
        shape: shape of the tensor.
        offset: first byte of the tensor within the file.
        scales: place of the scales of an FP8 or MXFP4 matrix; None for other tensors.
    """

    file: Path
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    scales: StoredTensor | None = None

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)

    @property
    def row_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape[1:])

    @property
    def is_mxfp4(self) -> bool:
        """True for a matrix of 4-bit numbers, which can only be read whole."""
        return self.scales is not None and self.scales.dtype == DTYPES["uint8"]

    def piece(self, first: int, shape: tuple[int, ...]) -> StoredTensor:
        """Return the piece of this shape that begins at row ``first``."""
        if self.scales is None:
            return replace(self, shape=shape, offset=self.offset + first * self.row_bytes)
        # gpt-oss' experts: a slice is one expert, with its codes and its scales.
        assert self.is_mxfp4, self
        scales = self.scales.piece(first, self.scales.shape[1:])
        codes_before = first * self.scales.row_bytes * MXFP4_BYTES
        return replace(self, shape=shape, offset=self.offset + codes_before, scales=scales)


class SafetensorsFolder:
    """The weights of a Hugging Face model folder.

    Attributes:
        folder: the folder.
        tensors: name of a tensor, or of a piece of one -> its place.
        fp8_block: rows and columns of FP8's blocks.
    """

    def __init__(
        self,
        folder: Path,
        pieces: Mapping[str, tuple[int, ...]] | None = None,
        aliases: Mapping[str, str] | None = None,
        *,
        decodes: bool = True,
        fp8_block: tuple[int, int] = FP8_BLOCK,
    ) -> None:
        """Read every header and check it against the file.

        Args:
            folder: the model's folder.
            pieces: names and shapes of the pieces in which to read tensors (`models.shared_mappings`).
            aliases: prefixes of names in the files -> prefixes of these names in the tables.
            decodes: True: FP8 and MXFP4 matrices are read as bf16, and their scales are not listed. False:
                all tensors are listed as they are stored.
            fp8_block: rows and columns of FP8's blocks.
        """
        self.folder = folder
        self.fp8_block = fp8_block
        self.tensors: dict[str, StoredTensor] = {}
        check_weights(folder)
        for file in weight_files(folder):
            for name, stored in read_header(file).items():
                if name in self.tensors:
                    raise UserError(
                        f"{name} is in {self.tensors[name].file.name} and {file.name}; remove one"
                    )
                self.tensors[name] = stored
        # The index has the files' names, so aliases and pieces come after it.
        self._check_index()
        self._rename(aliases or {})
        if decodes:
            self._pair_scales()
            self._pair_blocks()
        self._take_apart(pieces or {})
        self._descriptors = open_all(self.files)

    def _rename(self, aliases: Mapping[str, str]) -> None:
        for alias, prefix in aliases.items():
            aliased_names = [name for name in self.tensors if name.startswith(alias)]
            for name in aliased_names:
                self.tensors[prefix + name.removeprefix(alias)] = self.tensors.pop(name)

    @property
    def files(self) -> list[Path]:
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory."""
        stored = self.tensors[name]
        data = bytearray(stored.num_bytes)
        num_rows = stored.shape[0] if stored.shape else 1
        self._read(stored, 0, num_rows, memoryview(data))
        return tensor_of(data, stored.dtype, stored.shape)

    def read_rows(self, name: str, first: int, count: int, buffer: Buffer) -> memoryview:
        """Read some rows of a tensor into memory of ``buffer``."""
        stored = self.tensors[name]
        data = buffer.take(count * stored.row_bytes)
        self._read(stored, first, count, data)
        return data

    def _read(self, stored: StoredTensor, first: int, count: int, data: memoryview) -> None:
        """Fill ``data`` with ``count`` rows from row ``first`` on, decoded."""
        if stored.scales is None:
            self._fill(stored.file, stored.offset + first * stored.row_bytes, data)
        elif stored.is_mxfp4:
            assert (first, count) == (0, stored.shape[0]), stored
            data[:] = byte_view(self._decode_mxfp4(stored, stored.scales))
        else:
            data[:] = byte_view(self._decode_fp8(stored, stored.scales, first, count))

    def _decode_fp8(self, stored: StoredTensor, scales: StoredTensor, first: int, count: int) -> Tensor:
        """Read and decode rows of an FP8 matrix. Reads the scales of all blocks that have one of the rows."""
        columns = stored.shape[1]
        code_bytes = bytearray(count * columns)
        self._fill(stored.file, stored.offset + first * columns, memoryview(code_bytes))
        codes = tensor_of(code_bytes, DTYPES["float8_e4m3fn"], (count, columns))

        block_rows = self.fp8_block[0]
        first_block = first // block_rows
        end_block = (first + count - 1) // block_rows + 1
        num_blocks = end_block - first_block
        scale_bytes = bytearray(num_blocks * scales.row_bytes)
        self._read(scales, first_block, num_blocks, memoryview(scale_bytes))
        block_scales = tensor_of(scale_bytes, scales.dtype, (num_blocks, scales.shape[1]))
        return decode_fp8(codes, block_scales, first, self.fp8_block)

    def _decode_mxfp4(self, stored: StoredTensor, scales: StoredTensor) -> Tensor:
        """Read and decode a matrix of 4-bit numbers."""
        code_bytes = bytearray(scales.num_bytes * MXFP4_BYTES)
        scale_bytes = bytearray(scales.num_bytes)
        self._fill(stored.file, stored.offset, memoryview(code_bytes))
        self._fill(scales.file, scales.offset, memoryview(scale_bytes))
        blocks = tensor_of(code_bytes, scales.dtype, (*scales.shape, MXFP4_BYTES))
        return decode_mxfp4(blocks, tensor_of(scale_bytes, scales.dtype, scales.shape))

    def _fill(self, file: Path, offset: int, data: memoryview) -> None:
        if read_into(self._descriptors[file], offset, data) != len(data):
            raise damaged(file, "it ends within a tensor")

    def _pair_scales(self) -> None:
        """Attach its scales to each FP8 matrix, and list the matrix as bf16, in which it is read."""
        scales_names = [name for name in self.tensors if name.endswith(FP8_SCALE)]
        for scales_name in scales_names:
            matrix_name = scales_name.removesuffix(FP8_SCALE)
            scales = self.tensors[scales_name]
            matrix = self.tensors.get(matrix_name)
            if matrix is None or matrix.dtype != DTYPES["float8_e4m3fn"]:
                continue
            expected_shape = fp8_scales_shape(matrix.shape, self.fp8_block)
            if scales.shape != expected_shape or scales.dtype not in WEIGHT_DTYPES:
                block_rows, block_columns = self.fp8_block
                raise UserError(
                    f"{scales_name} is {scales.dtype} {list(scales.shape)}, not a number for each block of "
                    f"{block_rows} x {block_columns}; dequantise the model to bf16 and convert that"
                )
            self.tensors[matrix_name] = replace(matrix, dtype=DTYPES["bfloat16"], scales=scales)
            del self.tensors[scales_name]

    def _pair_blocks(self) -> None:
        """List the blocks of 4-bit numbers and the scales of an MXFP4 matrix as one bf16 matrix."""
        blocks_names = [name for name in self.tensors if name.endswith(MXFP4_BLOCKS)]
        for blocks_name in blocks_names:
            matrix_name = blocks_name.removesuffix(MXFP4_BLOCKS)
            scales_name = matrix_name + MXFP4_SCALES
            blocks = self.tensors[blocks_name]
            scales = self.tensors.get(scales_name)
            if scales is None or blocks.dtype != DTYPES["uint8"]:
                continue
            shape = mxfp4_shape(blocks.shape, scales.shape)
            if shape is None or scales.dtype != DTYPES["uint8"]:
                raise UserError(
                    f"{blocks_name} is {blocks.dtype} {list(blocks.shape)}, its scales {scales.dtype} "
                    f"{list(scales.shape)}: no MXFP4; dequantise the model to bf16 and convert that"
                )
            matrix = replace(blocks, dtype=DTYPES["bfloat16"], shape=shape, scales=scales)
            self.tensors[matrix_name] = matrix
            del self.tensors[blocks_name], self.tensors[scales_name]

    def _take_apart(self, pieces: Mapping[str, tuple[int, ...]]) -> None:
        """Replace tensors by their pieces. `Family.check_hf` refuses those of another shape later."""
        for tensor_name, pieces_of_tensor in by_tensor(pieces.items()):
            stored = self.tensors.get(tensor_name)
            names, shapes = zip(*pieces_of_tensor, strict=True)
            if stored is None or stored.shape != whole_shape(names, shapes):
                continue
            del self.tensors[tensor_name]
            first = 0
            for name, shape in pieces_of_tensor:
                self.tensors[name] = stored.piece(first, shape)
                first += 1 if is_slice(name) else shape[0]

    def close(self) -> None:
        close_all(self._descriptors)

    def _check_index(self) -> None:
        index = weight_map(self.folder)
        absent_names = set(index) - set(self.tensors)
        if absent_names:
            files = listed({index[name] for name in absent_names})
            raise UserError(
                f"{self.folder / INDEX} names tensors that are not in {files}: {listed(absent_names)}; "
                "download the model again"
            )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of one file: name -> place of the tensor."""
    # Valid JSON that is no header raises one of these where its values are used.
    further_errors = (TypeError, AttributeError, KeyError)
    remedy = "it may be truncated; copy or download it again"
    with reading(file, "a safetensors file", remedy, *further_errors), file.open("rb") as stream:
        file_size = file.stat().st_size
        length_field = stream.read(_LENGTH_BYTES)
        # A file too short for the length field gets a length that the next check refuses.
        length = file_size
        if len(length_field) == _LENGTH_BYTES:
            length = struct.unpack("<Q", length_field)[0]
        if length > min(file_size - _LENGTH_BYTES, _MAX_HEADER):
            raise damaged(file, f"a header of {length} bytes does not fit in {file_size} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        data_start = _LENGTH_BYTES + length
        tensors = {name: _stored(file, data_start, name, entry) for name, entry in header.items()}
    _check_adjacent(file, tensors, data_start, file_size)
    return tensors


def _check_adjacent(file: Path, tensors: Mapping[str, StoredTensor], start: int, end: int) -> None:
    """Refuse a file whose tensors leave gaps, overlap, or do not end with the file."""
    # Sorted by size, too, because an empty tensor has the same offset as the one after it.
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes))
    position = start
    for name, stored in in_order:
        if stored.offset != position:
            raise damaged(file, f"{name} starts at byte {stored.offset} instead of {position}")
        position += stored.num_bytes
    if position != end:
        raise damaged(file, f"it has {end} bytes, its header says {position}")


def _stored(file: Path, data_start: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    """Read one tensor's entry of a header, and check its numbers.

    Args:
        file: file with the header.
        data_start: first byte after the header.
        name: name of the tensor.
        entry: dtype, shape and offsets of the tensor, as the header has them.
    """
    if entry["dtype"] in SUB_BYTE:
        raise UserError(
            f"{name} in {file} is stored as {entry['dtype']}, which is not read; dequantise the model to "
            "bf16 and convert that"
        )
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in (begin, end, *shape)):
        raise ValueError(f"data_offsets {[begin, end]!r:.60} and shape {shape!r:.60} are no lists of sizes")
    stored = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(shape), data_start + begin)
    if end - begin != stored.num_bytes:
        raise ValueError(f"data_offsets {[begin, end]} for {entry['dtype']} {entry['shape']}")
    return stored
