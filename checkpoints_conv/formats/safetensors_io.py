"""Hugging Face safetensors folders: single tensors read at their place, without mapping files.

The format is a length, a JSON header and the bytes. ``pread`` instead of a memory map keeps the resident
memory small, and the header shows truncated files before anything is converted.
"""

from __future__ import annotations

import json
import math
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
from nemo_grpo.models.shared_mappings import grouped, is_numbered, whole_shape
from nemo_grpo.support.errors import UserError, listed, reading
from nemo_grpo.support.model_folder import INDEX, check_weights, weight_files, weight_map

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Place of one tensor.

    Attributes: dtype: as it is read.  offset: first byte within the file.
                scales: of matrices in FP8 or MXFP4.
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
        assert self.is_mxfp4, self
        scales = self.scales.piece(first, self.scales.shape[1:])
        codes = first * self.scales.row_bytes * MXFP4_BYTES
        return replace(self, shape=shape, offset=self.offset + codes, scales=scales)


class SafetensorsFolder:
    """The weights of a Hugging Face model folder. Attributes: folder; tensors: by name."""

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

        Args: pieces: names and shapes of the pieces in which to read tensors (`models.shared_mappings`).
              aliases: prefixes of names in files -> those in the tables.
              decodes: FP8 and MXFP4 are read as bf16, and their scales are no tensors.
              fp8_block: rows and columns of FP8's blocks.
        """
        self.folder, self.fp8_block = folder, fp8_block
        self.tensors: dict[str, StoredTensor] = {}
        check_weights(folder)
        for file in weight_files(folder):
            for name, stored in read_header(file).items():
                if name in self.tensors:
                    raise UserError(
                        f"{name} is in {self.tensors[name].file.name} and {file.name}; remove one"
                    )
                self.tensors[name] = stored
        self._check_index()
        for alias, prefix in (aliases or {}).items():
            for name in [name for name in self.tensors if name.startswith(alias)]:
                self.tensors[prefix + name.removeprefix(alias)] = self.tensors.pop(name)
        if decodes:
            self._pair_scales()
            self._pair_blocks()
        self._take_apart(pieces or {})
        self._descriptors = open_all(self.files)

    @property
    def files(self) -> list[Path]:
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory."""
        stored, data = self.tensors[name], bytearray(self.tensors[name].num_bytes)
        self._read(stored, 0, math.prod(stored.shape[:1]), memoryview(data))
        return tensor_of(data, stored.dtype, stored.shape)

    def read_rows(self, name: str, first: int, count: int, buffer: Buffer) -> memoryview:
        """Read some rows of a tensor into memory of ``buffer``."""
        stored = self.tensors[name]
        data = buffer.take(count * stored.row_bytes)
        self._read(stored, first, count, data)
        return data

    def _read(self, stored: StoredTensor, first: int, count: int, data: memoryview) -> None:
        if stored.scales is None:
            self._fill(stored.file, stored.offset + first * stored.row_bytes, data)
            return
        if stored.is_mxfp4:
            assert (first, count) == (0, stored.shape[0]), stored
            data[:] = byte_view(self._decoded(stored, stored.scales))
            return
        columns, blocks = stored.shape[1], stored.scales
        codes = bytearray(count * columns)
        self._fill(stored.file, stored.offset + first * columns, memoryview(codes))
        height = self.fp8_block[0]
        above, below = first // height, (first + count - 1) // height + 1
        scales = bytearray((below - above) * blocks.row_bytes)
        self._read(blocks, above, below - above, memoryview(scales))
        coded = tensor_of(codes, DTYPES["float8_e4m3fn"], (count, columns))
        scaled = tensor_of(scales, blocks.dtype, (below - above, blocks.shape[1]))
        data[:] = byte_view(decode_fp8(coded, scaled, first, self.fp8_block))

    def _decoded(self, stored: StoredTensor, scales: StoredTensor) -> Tensor:
        codes, powers = bytearray(scales.num_bytes * MXFP4_BYTES), bytearray(scales.num_bytes)
        self._fill(stored.file, stored.offset, memoryview(codes))
        self._fill(scales.file, scales.offset, memoryview(powers))
        blocks = tensor_of(codes, scales.dtype, (*scales.shape, MXFP4_BYTES))
        return decode_mxfp4(blocks, tensor_of(powers, scales.dtype, scales.shape))

    def _fill(self, file: Path, offset: int, data: memoryview) -> None:
        if read_into(self._descriptors[file], offset, data) != len(data):
            raise damaged(file, "it ends within a tensor")

    def _pair_scales(self) -> None:
        """Attach the scales of FP8 matrices to them."""
        for name in [name for name in self.tensors if name.endswith(FP8_SCALE)]:
            scales, matrix = self.tensors[name], self.tensors.get(name.removesuffix(FP8_SCALE))
            if matrix is None or matrix.dtype != DTYPES["float8_e4m3fn"]:
                continue
            grid = fp8_scales_shape(matrix.shape, self.fp8_block)
            if scales.shape != grid or scales.dtype not in WEIGHT_DTYPES:
                height, width = self.fp8_block
                raise UserError(
                    f"{name} is {scales.dtype} {list(scales.shape)}, not a number for each block of "
                    f"{height} x {width}; dequantise the model to bf16 and convert that"
                )
            decoded = replace(matrix, dtype=DTYPES["bfloat16"], scales=scales)
            self.tensors[name.removesuffix(FP8_SCALE)] = decoded
            del self.tensors[name]

    def _pair_blocks(self) -> None:
        """Join the 4-bit numbers of MXFP4 matrices and their scales."""
        for name in [name for name in self.tensors if name.endswith(MXFP4_BLOCKS)]:
            whole = name.removesuffix(MXFP4_BLOCKS)
            blocks, scales = self.tensors[name], self.tensors.get(whole + MXFP4_SCALES)
            if scales is None or blocks.dtype != DTYPES["uint8"]:
                continue
            shape = mxfp4_shape(blocks.shape, scales.shape)
            if shape is None or scales.dtype != DTYPES["uint8"]:
                raise UserError(
                    f"{name} is {blocks.dtype} {list(blocks.shape)}, its scales {scales.dtype} "
                    f"{list(scales.shape)}: no MXFP4; dequantise the model to bf16 and convert that"
                )
            self.tensors[whole] = replace(blocks, dtype=DTYPES["bfloat16"], shape=shape, scales=scales)
            del self.tensors[name], self.tensors[whole + MXFP4_SCALES]

    def _take_apart(self, pieces: Mapping[str, tuple[int, ...]]) -> None:
        """Replace tensors by their pieces; a tensor of another shape stays whole."""
        for whole, group in grouped(pieces.items()):
            stored = self.tensors.get(whole)
            if stored is None or stored.shape != whole_shape(*zip(*group, strict=True)):
                continue
            del self.tensors[whole]
            first = 0
            for name, shape in group:
                self.tensors[name] = stored.piece(first, shape)
                first += 1 if is_numbered(name) else shape[0]

    def close(self) -> None:
        close_all(self._descriptors)

    def _check_index(self) -> None:
        index = weight_map(self.folder)
        if missing := set(index) - set(self.tensors):
            files = listed({index[name] for name in missing})
            raise UserError(
                f"{self.folder / INDEX} names tensors that are not in {files}: {listed(missing)}; download "
                "the model again"
            )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of one file, by name."""
    further = TypeError, AttributeError, KeyError
    with (
        reading(file, "a safetensors file", "it may be truncated; copy or download it again", *further),
        file.open("rb") as stream,
    ):
        size, start = file.stat().st_size, stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise damaged(file, f"a header of {length} bytes does not fit in {size} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, name, entry) for name, entry in header.items()}
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset != end:
            raise damaged(file, f"{name} starts at byte {stored.offset} instead of {end}")
        end += stored.num_bytes
    if end != size:
        raise damaged(file, f"it has {size} bytes, its header says {end}")
    return tensors


def _stored(file: Path, base: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    if entry["dtype"] in SUB_BYTE:
        raise UserError(
            f"{name} in {file} is stored as {entry['dtype']}, which is not read; dequantise the model to "
            "bf16 and convert that"
        )
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in (begin, end, *shape)):
        raise ValueError(f"data_offsets {[begin, end]!r:.60} and shape {shape!r:.60} are no lists of sizes")
    stored = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(shape), base + begin)
    if end - begin != stored.num_bytes:
        raise ValueError(f"data_offsets {[begin, end]} for {entry['dtype']} {entry['shape']}")
    return stored
