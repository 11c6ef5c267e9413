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
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import DTYPES, Dtype, byte_view, tensor_of
from checkpoints_conv.formats.pickles import (
    RefusingUnpickler,
    StoredStorage,
    check_describes_tensor,
)
from checkpoints_conv.formats.pieces import crc32_of, damaged, read_into, scatter_into, write_from
from nemo_grpo.core.lazy import torch
from nemo_grpo.support.errors import UserError

_NAME = "archive"
"""Folder of the members within the archive, as torch.save names it."""
_ALIGNMENT = 64
"""Alignment in bytes of the data within the archive, as in torch.save."""
_LOCAL_HEADER = struct.Struct("<26x2H")
"""A zip member's header up to the lengths of its name and of its extra field."""
_EXTRA_HEADER_BYTES = 4
"""Tag and length before an extra field's content."""
_ZIP64_EXTRA_BYTES = 20
"""Extra field with 64-bit sizes that zipfile adds by ``force_zip64``."""


class Section(io.RawIOBase):
    """A part of a file that zipfile can read and write as if it were a whole file.

    Attributes:
        descriptor: descriptor of the file.
        start: first byte of the part in the file.
        length: number of bytes in the part.
        position: byte of the part at which the next read or write begins.
    """

    def __init__(self, descriptor: int, start: int, length: int = 0) -> None:
        self.descriptor = descriptor
        self.start = start
        self.length = length
        self.position = 0

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
        num_available = max(0, self.length - self.position)
        view = view[:num_available]
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
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        # torch counts an empty axis as one of length 1.
        stride *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorReference:
    """A contiguous tensor whose bytes are in ``data/<key>`` of the archive. It pickles as in torch.save."""

    dtype: Dtype
    shape: tuple[int, ...]
    key: str

    def __reduce__(self) -> tuple[Any, ...]:
        storage = StoredStorage(self.dtype, self.key, math.prod(self.shape))
        offset = 0
        requires_grad = False
        backward_hooks: Any = collections.OrderedDict()
        arguments = (storage, offset, self.shape, strides_of(self.shape), requires_grad, backward_hooks)
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, StoredStorage):
            return None
        return "storage", getattr(torch, obj.dtype.storage), obj.key, "cpu", obj.num_elements


def _pickled(tree: Any) -> bytes:
    stream = io.BytesIO()
    # Protocol 2 is the one that torch.load(weights_only=True) reads.
    _Pickler(stream, protocol=2).dump(tree)
    return stream.getvalue()


def save(stream: Any, tree: Any, data: Mapping[str, Iterable[bytes | memoryview]] | None = None) -> None:
    """Write an archive that ``torch.load(weights_only=True)`` reads.

    Args:
        stream: file to write to.
        tree: content of the archive: plain values, and a `TensorReference` in place of each tensor.
        data: key of each tensor's data -> its bytes, in pieces.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        members = {"data.pkl": _pickled(tree), "byteorder": b"little", "version": b"3\n"}
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{_NAME}/{name}"), content)
        for key, pieces in (data or {}).items():
            info = zipfile.ZipInfo(f"{_NAME}/data/{key}")
            info.extra = _padding(stream.tell(), len(info.filename))
            # The size is not known before the pieces are written, and may be above 4 GB.
            with archive.open(info, "w", force_zip64=True) as member:
                for piece in pieces:
                    member.write(piece)


def _padding(position: int, name_length: int) -> bytes:
    """Make the extra field (tag FB) that aligns a member's data, as torch.save does.

    Args:
        position: first byte of the member's header.
        name_length: length of the member's name.
    """
    header_bytes = _LOCAL_HEADER.size + name_length + _EXTRA_HEADER_BYTES + _ZIP64_EXTRA_BYTES
    num_padding_bytes = -(position + header_bytes) % _ALIGNMENT
    return struct.pack("<2sH", b"FB", num_padding_bytes) + bytes(num_padding_bytes)


@dataclass(frozen=True)
class _Layout:
    """Layout of a saved tensor, as its pickle describes it.

    Attributes:
        storage: storage with the tensor's bytes.
        offset: first element of the tensor in the storage.
        shape: shape of the tensor.
        stride: per axis, elements from one index to the next.
    """

    storage: StoredStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """True if the storage holds exactly the tensor's elements, in their order."""
        if self.offset != 0 or math.prod(self.shape) != self.storage.num_elements:
            return False
        contiguous = strides_of(self.shape)
        for size, stride, contiguous_stride in zip(self.shape, self.stride, contiguous, strict=True):
            # The stride of an axis of length 1 is arbitrary.
            if size > 1 and stride != contiguous_stride:
                return False
        return True


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_further: Any) -> _Layout:
    """Check that the numbers describe a tensor within its storage."""
    numbers = (offset, storage.num_elements, *shape, *stride)
    are_sizes = all(type(number) is int and 0 <= number < 1 << 60 for number in numbers)
    if len(shape) != len(stride) or not are_sizes:
        raise ValueError(f"{shape!r:.60} and {stride!r:.60} are no shape and strides")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    is_empty = 0 in shape
    if not is_empty and last >= storage.num_elements:
        raise ValueError(f"the tensor ends at {last} of {storage.num_elements} elements")
    return _Layout(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(data: Any, *_further: Any) -> Any:
    return data


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{("torch", dtype.storage): dtype for dtype in DTYPES.values() if dtype.storage},
}


class SavedTensor:
    """A tensor in a torch.save archive, read from front to end.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the tensor.
    """

    def __init__(self, file: Path, descriptor: int, start: int, length: int) -> None:
        """Read the archive's directory and the tensor's layout.

        Args:
            file: name of the file, for messages.
            descriptor: descriptor of the file.
            start: first byte of the archive in the file.
            length: number of bytes of the archive.
        """
        self._file = file
        self._descriptor = descriptor
        self._start = start
        try:
            with zipfile.ZipFile(Section(descriptor, start, length)) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                # At most 64 KB: a compressed member could expand to any size.
                pickled = archive.open(members["data.pkl"]).read(1 << 16)
                order = members.get("byteorder")
                if order is not None and archive.read(order) != b"little":
                    raise damaged(file, "a chunk is not little-endian")
            check_describes_tensor(pickled)
            layout = RefusingUnpickler(io.BytesIO(pickled), _ALLOWED, str(file)).load()
        except UserError:
            raise
        except Exception as error:
            # Damaged archives and pickles can fail in any way.
            raise damaged(file, f"the chunk at byte {start} is no saved tensor ({error})") from None
        if not isinstance(layout, _Layout):
            raise damaged(file, f"the chunk at byte {start} holds no tensor")
        self._layout = layout
        self.dtype = layout.storage.dtype
        self.shape = layout.shape
        self._num_bytes = layout.storage.num_elements * self.dtype.itemsize
        data_member = members.get(f"data/{layout.storage.key}")
        if (
            data_member is None
            or data_member.compress_type != zipfile.ZIP_STORED
            or data_member.file_size != self._num_bytes
        ):
            raise damaged(file, f"the chunk at byte {start} has no plain data")
        self._data_start = self._start_of_data(data_member)
        self._expected_crc32 = data_member.CRC
        self._crc32 = 0
        self._position = 0

    def _start_of_data(self, member: zipfile.ZipInfo) -> int:
        """Return the byte of the file at which a member's data begins."""
        header_start = self._start + member.header_offset
        header = bytearray(_LOCAL_HEADER.size)
        read_into(self._descriptor, header_start, memoryview(header))
        # The directory does not say how long the extra field before the data is; only this header does.
        name_length, extra_length = _LOCAL_HEADER.unpack(header)
        return header_start + _LOCAL_HEADER.size + int(name_length) + int(extra_length)

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
        scatter_into(self._descriptor, self._data_start + offset, views)
        for view in views:
            self._crc32 = zlib.crc32(view, self._crc32)
            self._position += len(view)

    @cached_property
    def _in_order(self) -> memoryview:
        """Elements in their order of a tensor with unusual strides. It is read whole, because it is rare."""
        stored = bytearray(self._num_bytes)
        read_into(self._descriptor, self._data_start, memoryview(stored))
        layout = self._layout
        view = tensor_of(stored, self.dtype).as_strided(layout.shape, layout.stride, layout.offset)
        return byte_view(view.contiguous())

    def finish(self) -> None:
        """Read the remaining bytes, and compare the checksum."""
        self._check_until(self._num_bytes)
        if self._crc32 != self._expected_crc32:
            raise damaged(self._file, f"the chunk at byte {self._start} does not match its checksum")

    def _check_until(self, offset: int) -> None:
        """Add the bytes that were skipped before ``offset`` to the checksum."""
        num_skipped = offset - self._position
        self._crc32 = crc32_of(self._descriptor, self._data_start + self._position, num_skipped, self._crc32)
        self._position = offset
