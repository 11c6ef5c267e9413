"""Writing safetensors files: every tensor at a place that is fixed beforehand."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import Dtype, check_finite, num_bytes_of
from checkpoints_conv.formats.pieces import close_all, crc32_of, write_from
from checkpoints_conv.formats.safetensors_io import StoredTensor
from nemo_grpo.models.shared_mappings import by_tensor, whole_name, whole_shape
from nemo_grpo.support.model_folder import INDEX

Planned = tuple[str, Dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor to be written, or of a piece (`models.shared_mappings`)."""


def plan_shards(tensors: Iterable[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Divide tensors over files, in order. A file has at most ``max_shard_bytes``, or one larger tensor.

    Within a file they have the order in which the safetensors library writes them: wide dtypes first, then
    by name.
    """
    shards: list[list[tuple[str, list[Planned]]]] = [[]]
    shard_bytes = 0
    for tensor_name, pieces in by_tensor(tensors):
        num_bytes = sum(num_bytes_of(dtype, shape) for _, dtype, shape in pieces)
        if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append((tensor_name, pieces))
        shard_bytes += num_bytes
    return [_in_order(shard) for shard in shards]


def _in_order(shard: list[tuple[str, list[Planned]]]) -> list[Planned]:
    """Sort the tensors of a file; pieces keep the order that they have in their tensor."""

    def position(tensor: tuple[str, list[Planned]]) -> tuple[int, str]:
        tensor_name, pieces = tensor
        _, dtype, _ = pieces[0]
        return -dtype.itemsize, tensor_name

    return [piece for _, pieces in sorted(shard, key=position) for piece in pieces]


class SafetensorsWriter:
    """Writes tensors to places that are fixed beforehand, in any order and from any thread.

    Files are made at their full size with their headers; `open` and `write` fill in the data.

    Attributes:
        folder: folder of the files.
        tensors: name of a tensor, or of a piece of one -> its place.
        descriptors: descriptor of each file.
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
        """Make a file and fix the place of each tensor."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins = {}
        end = 0
        for tensor_name, pieces in by_tensor(shard):
            names, dtypes, shapes = zip(*pieces, strict=True)
            tensor_begin = end
            for name, dtype, shape in pieces:
                begins[name] = end
                end += num_bytes_of(dtype, shape)
            header[tensor_name] = {
                "dtype": dtypes[0].safetensors,
                "shape": list(whole_shape(names, shapes)),
                "data_offsets": [tensor_begin, end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        # The data begins at a multiple of 8 bytes, as the safetensors library has it.
        encoded += b" " * (-len(encoded) % 8)
        length = struct.pack("<Q", len(encoded))
        data_start = len(length) + len(encoded)
        # Not truncated on opening: an interrupted attempt's tensors are kept if their checksums are right.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        self.descriptors[file] = descriptor
        write_from(descriptor, 0, memoryview(length + encoded))
        os.ftruncate(descriptor, data_start + end)
        for name, dtype, shape in shard:
            self.tensors[name] = StoredTensor(file, dtype, shape, data_start + begins[name])

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self.tensors.values())

    def open(self, name: str) -> TensorWriter:
        """Open the place of a tensor, to fill it piece by piece."""
        return TensorWriter(name, self.tensors[name], self.descriptors[self.tensors[name].file])

    def write(self, name: str, data: memoryview) -> int:
        """Write a tensor's bytes to their place, and return their crc32."""
        place = self.open(name)
        place.write(data)
        assert place.is_full, name
        return place.crc32

    def holds(self, name: str, crc32: int) -> bool:
        """Return True if the bytes at the tensor's place have this checksum."""
        if name not in self.tensors:
            return False
        stored = self.tensors[name]
        return crc32_of(self.descriptors[stored.file], stored.offset, stored.num_bytes) == crc32

    def close(self) -> None:
        close_all(self.descriptors)

    def write_index(self) -> None:
        """Write the index that transformers and vLLM look for. A single file needs none."""
        if len({stored.file for stored in self.tensors.values()}) < 2:
            return
        weight_map = {whole_name(name): stored.file.name for name, stored in self.tensors.items()}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class TensorWriter:
    """Writes one tensor to its place, from front to end.

    Attributes:
        name: the tensor's name.
        stored: its place.
        crc32: checksum of the bytes written so far.
    """

    def __init__(self, name: str, stored: StoredTensor, descriptor: int) -> None:
        self.name = name
        self.stored = stored
        self.crc32 = 0
        self._descriptor = descriptor
        self._num_written = 0

    @property
    def is_full(self) -> bool:
        return self._num_written == self.stored.num_bytes

    def write(self, data: memoryview) -> None:
        """Append whole numbers, which are checked and summed while they are in the cache."""
        check_finite(data, self.stored.dtype, self.name)
        write_from(self._descriptor, self.stored.offset + self._num_written, data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._num_written += len(data)
