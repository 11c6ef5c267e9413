"""Hugging Face safetensors folders: read and write single tensors at their place, without mapping files.

The format is a length, a JSON header and the bytes. Reading through the header and ``pread`` instead of a
memory map keeps the resident memory small, and finds truncated files before anything is converted.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats import fp8
from checkpoints_conv.formats.dtypes import (
    DTYPES,
    WEIGHT_DTYPES,
    Dtype,
    byte_view,
    check_finite,
    num_bytes_of,
    tensor_of,
)
from checkpoints_conv.formats.model_folder import INDEX, check_weights, weight_files, weight_map
from checkpoints_conv.formats.pieces import (
    Buffer,
    close_all,
    crc32_of,
    damaged,
    open_all,
    read_into,
    write_from,
)
from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_MAX_HEADER = 100 << 20
Planned = tuple[str, Dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor to be written."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes: dtype: as it is read.  offset: first byte within the file.
                scales: of a matrix that is stored in FP8, in blocks (`formats.fp8`).
    """

    file: Path
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    scales: StoredTensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return num_bytes_of(self.dtype, self.shape)

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return num_bytes_of(self.dtype, self.shape[1:])


class SafetensorsFolder:
    """The weights of a Hugging Face model folder. Attributes: folder; tensors: by name."""

    def __init__(self, folder: Path, *, decodes: bool = True) -> None:
        """Read every header and check it against the file.

        Args:   decodes: FP8 with scales per block is read as bf16, and the scales are no tensors.
        Raises: UserError: no safetensors, a shard of the index is missing, or a file is damaged.
        """
        self.folder = folder
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
        if decodes:
            self._pair_scales()
        self._descriptors = open_all(self.files)

    @property
    def files(self) -> list[Path]:
        """The weight files."""
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor in memory."""
        stored, data = self.tensors[name], bytearray(self.tensors[name].num_bytes)
        self._read(stored, 0, math.prod(stored.shape[:1]), memoryview(data))
        return tensor_of(data, stored.dtype, stored.shape)

    def read_rows(self, name: str, first: int, count: int, buffer: Buffer) -> memoryview:
        """Some rows of a tensor, in memory from ``buffer``."""
        stored = self.tensors[name]
        data = buffer.take(count * stored.row_bytes)
        self._read(stored, first, count, data)
        return data

    def _read(self, stored: StoredTensor, first: int, count: int, data: memoryview) -> None:
        if stored.scales is None:
            self._fill(stored.file, stored.offset + first * stored.row_bytes, data)
            return
        columns, blocks = stored.shape[1], stored.scales
        codes = bytearray(count * columns)
        self._fill(stored.file, stored.offset + first * columns, memoryview(codes))
        above, below = first // fp8.BLOCK, (first + count - 1) // fp8.BLOCK + 1
        scales = bytearray((below - above) * blocks.row_bytes)
        self._read(blocks, above, below - above, memoryview(scales))
        coded = tensor_of(codes, DTYPES["float8_e4m3fn"], (count, columns))
        scaled = tensor_of(scales, blocks.dtype, (below - above, blocks.shape[1]))
        data[:] = byte_view(fp8.decode(coded, scaled, first))

    def _fill(self, file: Path, offset: int, data: memoryview) -> None:
        if read_into(self._descriptors[file], offset, data) != len(data):
            raise damaged(file, "it ends within a tensor")

    def _pair_scales(self) -> None:
        """Put the scales of FP8 matrices into their places.

        Raises: UserError: they are of other blocks.
        """
        for name in [name for name in self.tensors if name.endswith(fp8.SCALE)]:
            scales, matrix = self.tensors[name], self.tensors.get(name.removesuffix(fp8.SCALE))
            if matrix is None or matrix.dtype != DTYPES["float8_e4m3fn"]:
                continue
            if scales.shape != fp8.num_blocks(matrix.shape) or scales.dtype not in WEIGHT_DTYPES:
                raise UserError(
                    f"{name} is {scales.dtype} {list(scales.shape)}, not a number for each block of "
                    f"{fp8.BLOCK} x {fp8.BLOCK}; dequantise the model to bf16 and convert that"
                )
            decoded = replace(matrix, dtype=DTYPES["bfloat16"], scales=scales)
            self.tensors[name.removesuffix(fp8.SCALE)] = decoded
            del self.tensors[name]

    def close(self) -> None:
        """Close the files."""
        close_all(self._descriptors)

    def _check_index(self) -> None:
        index = weight_map(self.folder)
        missing = sorted(set(index) - set(self.tensors))
        if missing:
            files = ", ".join(sorted({index[name] for name in missing}))
            raise UserError(
                f"{self.folder / INDEX} names tensors that are not in {files}: {', '.join(missing)}"
            )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises: UserError: the file is truncated or its header is no safetensors header.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise damaged(file, f"a header of {length} bytes does not fit in {size} bytes")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(file, f"its header cannot be read ({error})") from None
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset != end:
            raise damaged(file, f"{name} starts at byte {stored.offset} instead of {end}")
        end += stored.num_bytes
    if end != size:
        raise damaged(file, f"it has {size} bytes, its header says {end}")
    return tensors


def _stored(file: Path, base: int, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    stored = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), base + begin)
    if end - begin != stored.num_bytes:
        raise ValueError(f"data_offsets {[begin, end]} for {entry['dtype']} {entry['shape']}")
    return stored


def plan_shards(tensors: Iterable[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Divide tensors over files in order; a file holds at most ``max_shard_bytes``, or one larger tensor."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = num_bytes_of(tensor[1], tensor[2])
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


class SafetensorsWriter:
    """Writes tensors to places that are fixed beforehand, in any order and from any thread.

    Files are made at their full size with their headers; `open` and `write` fill in the data.
    """

    def __init__(
        self, folder: Path, tensors: Iterable[Planned], max_shard_bytes: int, name: str = "model"
    ) -> None:
        shards = plan_shards(tensors, max_shard_bytes)
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.descriptors: dict[Path, int] = {}
        for number, shard in enumerate(shards, start=1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            self._lay_out(folder / f"{name}{suffix}.safetensors", shard)

    def _lay_out(self, file: Path, shard: list[Planned]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in shard:
            begin, end = end, end + num_bytes_of(dtype, shape)
            header[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self.descriptors[file] = descriptor
        write_from(descriptor, 0, memoryview(struct.pack("<Q", len(text)) + text))
        os.ftruncate(descriptor, 8 + len(text) + end)
        for name, dtype, shape in shard:
            offset = 8 + len(text) + header[name]["data_offsets"][0]
            self.tensors[name] = StoredTensor(file, dtype, shape, offset)

    @property
    def num_bytes(self) -> int:
        """Size of all data."""
        return sum(stored.num_bytes for stored in self.tensors.values())

    def open(self, name: str) -> TensorWriter:
        """The place of a tensor, to be filled piece by piece."""
        return TensorWriter(name, self.tensors[name], self.descriptors[self.tensors[name].file])

    def write(self, name: str, data: memoryview) -> int:
        """Put a tensor's bytes at their place. Returns: their crc32."""
        place = self.open(name)
        place.write(data)
        assert place.is_full, name
        return place.crc32

    def holds(self, name: str, crc32: int) -> bool:
        """True if what lies at the tensor's place has this checksum."""
        if name not in self.tensors:
            return False
        stored = self.tensors[name]
        return crc32_of(self.descriptors[stored.file], stored.offset, stored.num_bytes) == crc32

    def close(self) -> None:
        """Close the files."""
        close_all(self.descriptors)

    def write_index(self) -> None:
        """Write the index that transformers and vLLM look for; one file alone needs none."""
        if len({stored.file for stored in self.tensors.values()}) < 2:
            return
        weight_map = {name: stored.file.name for name, stored in self.tensors.items()}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class TensorWriter:
    """Fills a tensor's place from front to end. Attributes: name; stored; crc32: of what was written."""

    def __init__(self, name: str, stored: StoredTensor, descriptor: int) -> None:
        self.name, self.stored, self.crc32 = name, stored, 0
        self._descriptor, self._done = descriptor, 0

    @property
    def is_full(self) -> bool:
        """True once all bytes are there."""
        return self._done == self.stored.num_bytes

    def write(self, data: memoryview) -> None:
        """Append whole numbers; they are checked, and their checksum is taken, while they are in the cache.

        Raises: UserError: one is NaN or infinite.
        """
        check_finite(data, self.stored.dtype, self.name)
        write_from(self._descriptor, self.stored.offset + self._done, data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._done += len(data)
