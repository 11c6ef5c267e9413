"""torch.save archives at an offset of a file: tensors read without running a pickle, and written in pieces.

`torch.load` would copy a tensor twice and does not check the archive's checksums; `torch.save` wants it whole
in memory. The archive is a zip file with ``data.pkl`` (shape and strides) and ``data/0`` (the bytes).
"""

import collections
import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import DTYPES, Dtype, byte_view, tensor_of
from checkpoints_conv.formats.pickles import (
    RefusingUnpickler,
    StoredStorage,
    check_of_tensor,
)
from checkpoints_conv.formats.pieces import crc32_of, damaged, read_into, scatter_into, write_from
from nemo_grpo.core.lazy import torch
from nemo_grpo.support.errors import UserError

_NAME = "archive"
_ALIGNMENT = 64  # of data within the file, as torch.save has it
_LOCAL_HEADER = struct.Struct("<26x2H")


class Section(io.RawIOBase):
    """A part of a file as a file of its own, for zipfile. Attributes: length: bytes that are in it."""

    def __init__(self, descriptor: int, start: int, length: int = 0) -> None:
        self.descriptor, self.start, self.length, self.position = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.length - self.position))]
        count = read_into(self.descriptor, self.start + self.position, view)
        self.position += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_from(self.descriptor, self.start + self.position, view)
        self.position += len(view)
        self.length = max(self.length, self.position)
        return len(view)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the strides of a contiguous tensor, in elements."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1][: len(shape)]


@dataclass(frozen=True)
class TensorReference:
    """A contiguous tensor whose bytes are in the archive's ``data/<key>``; pickled as torch.save does."""

    dtype: Dtype
    shape: tuple[int, ...]
    key: str

    def __reduce__(self) -> tuple[Any, ...]:
        storage = StoredStorage(self.dtype, self.key, math.prod(self.shape))
        layout: tuple[Any, ...] = (0, self.shape, strides_of(self.shape), False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, (storage, *layout)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, StoredStorage):
            return None
        return "storage", getattr(torch, obj.dtype.storage), obj.key, "cpu", obj.num_elements


def _pickled(tree: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(tree)  # the protocol that torch.load(weights_only=True) reads
    return stream.getvalue()


def save(stream: Any, tree: Any, data: Mapping[str, Iterable[bytes | memoryview]] | None = None) -> None:
    """Write an archive that ``torch.load(weights_only=True)`` reads.

    Args: tree: plain values and `TensorReference`.  data: bytes of the storages by their keys, in pieces.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        for name, text in (("data.pkl", _pickled(tree)), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"{_NAME}/{name}"), text)
        for key, pieces in (data or {}).items():
            info = zipfile.ZipInfo(f"{_NAME}/data/{key}")
            end = stream.tell() + 30 + len(info.filename) + 4 + 20  # header, padding's header, zip64 sizes
            info.extra = struct.pack("<2sH", b"FB", -end % _ALIGNMENT) + bytes(-end % _ALIGNMENT)
            with archive.open(info, "w", force_zip64=True) as out:
                for piece in pieces:
                    out.write(piece)


@dataclass(frozen=True)
class _Layout:
    storage: StoredStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """True if the storage is the tensor's elements in their order."""
        whole = self.offset == 0 and math.prod(self.shape) == self.storage.num_elements
        axes = [n > 1 for n in self.shape]
        wanted = strides_of(self.shape)
        return whole and all(
            a == b for a, b, matters in zip(self.stride, wanted, axes, strict=True) if matters
        )


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_rest: Any) -> _Layout:
    """Check that the numbers describe a tensor within its storage."""
    numbers = (offset, storage.num_elements, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        raise ValueError(f"{shape!r:.60} and {stride!r:.60} are no shape and strides")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if all(shape) and last >= storage.num_elements:
        raise ValueError(f"the tensor ends at {last} of {storage.num_elements} elements")
    return _Layout(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(data: Any, *_rest: Any) -> Any:
    return data


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{("torch", dtype.storage): dtype for dtype in DTYPES.values() if dtype.storage},
}


class SavedTensor:
    """One saved tensor, read from front to end. Attributes: dtype, shape."""

    def __init__(self, file: Path, descriptor: int, start: int, length: int) -> None:
        """Read the archive's directory and the tensor's layout."""
        self._where, self._descriptor, self._start = file, descriptor, start
        try:
            with zipfile.ZipFile(Section(descriptor, start, length)) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                pickled = archive.open(members["data.pkl"]).read(1 << 16)
                order = members.get("byteorder")
                if order is not None and archive.read(order) != b"little":
                    raise damaged(file, "a chunk is not little-endian")
            check_of_tensor(pickled)
            layout = RefusingUnpickler(io.BytesIO(pickled), _ALLOWED, str(file)).load()
        except UserError:
            raise
        except Exception as error:  # damaged archives and pickles can fail in any way
            raise damaged(file, f"the chunk at byte {start} is no saved tensor ({error})") from None
        if not isinstance(layout, _Layout):
            raise damaged(file, f"the chunk at byte {start} holds no tensor")
        self._layout = layout
        self.dtype, self.shape = layout.storage.dtype, layout.shape
        self._size = layout.storage.num_elements * self.dtype.itemsize
        self._find(members.get(f"data/{layout.storage.key}"))

    def _find(self, info: zipfile.ZipInfo | None) -> None:
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != self._size:
            raise damaged(self._where, f"the chunk at byte {self._start} has no plain data")
        header = bytearray(_LOCAL_HEADER.size)
        read_into(self._descriptor, self._start + info.header_offset, memoryview(header))
        self._begin = (
            self._start + info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        )
        self._expected, self._crc32, self._position = info.CRC, 0, 0

    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill equally long views, one after the other, from byte ``offset`` of the tensor's elements.

        The checksum is taken on the way, so offsets must not go backwards.
        """
        if not self._layout.is_plain:
            for view in views:
                view[:] = self._in_order[offset : offset + len(view)]
                offset += len(view)
            return
        assert offset >= self._position, "backwards"
        self._check_until(offset)
        scatter_into(self._descriptor, self._begin + offset, views)
        for view in views:
            self._crc32 = zlib.crc32(view, self._crc32)
            self._position += len(view)

    @cached_property
    def _in_order(self) -> memoryview:
        """The elements of a tensor with other strides, in memory; such tensors are rare."""
        stored, layout = bytearray(self._size), self._layout
        read_into(self._descriptor, self._begin, memoryview(stored))
        view = tensor_of(stored, self.dtype).as_strided(layout.shape, layout.stride, layout.offset)
        return byte_view(view.contiguous())

    def finish(self) -> None:
        """Read the rest, and compare the checksum."""
        self._check_until(self._size)
        if self._crc32 != self._expected:
            raise damaged(self._where, f"the chunk at byte {self._start} does not match its checksum")

    def _check_until(self, offset: int) -> None:
        begin, length = self._begin + self._position, offset - self._position
        self._crc32 = crc32_of(self._descriptor, begin, length, self._crc32)
        self._position = offset
