"""Reading of Megatron's torch_dist checkpoints, chunk by chunk, without megatron or process groups.

A folder holds ``.metadata`` (which key has which chunks, and where they lie), ``*.distcp`` files (one saved
tensor after the other), ``common.pt`` and ``metadata.json``. Decoder layers are stacked: axis 0 of
``decoder.layers.<name>`` is the layer, axis 1 of expert weights the expert.
"""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.archive import SavedTensor
from checkpoints_conv.formats.dtypes import DTYPES, Dtype, num_bytes_of, tensor_of
from checkpoints_conv.formats.pickles import load_guarded, refused
from checkpoints_conv.formats.pieces import Buffer, close_all, damaged, open_all
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import UserError, reading

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Folder, and content of the tracker, of a checkpoint that no iteration made: a converted base model."""
_NO_WEIGHTS = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state|common_state|opt_param)\b.*|.*_extra_state.*"
)
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..*")


class _Record:
    """Fields of a class in the metadata's pickle; importing the classes would take a second."""

    def __setstate__(self, state: Any) -> None:
        # TensorProperties, whose dtype comes first, is the one class that keeps no names.
        self.__dict__.update(state if isinstance(state, dict) else {"dtype": state[0]})


class _Enumeration(_Record):
    """An enumeration; which member of it does not matter here."""

    def __init__(self, _member: Any) -> None:
        """Take the member's value, or from `_member_of` its name."""


def _records(*names: str, kind: type[_Record] = _Record) -> dict[str, type[_Record]]:
    return {name: type(name, (kind,), {}) for name in names}


def _member_of(where: str, owner: Any, name: Any) -> _Enumeration:
    """Replace the ``getattr`` with which Python 3.11.2 (Debian 12) pickles an enumeration's member."""
    if not (isinstance(owner, type) and issubclass(owner, _Enumeration)):
        raise refused(where, f"an attribute ({name!r})")
    return owner(name)


_CLASSES = {
    "torch.distributed.checkpoint.metadata": _records(
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata"),
    )
    | _records("_MEM_FORMAT_ENCODING", kind=_Enumeration),
    "torch.distributed.checkpoint.filesystem": _records("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": _records(
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")
    )
    | _records("WriteItemType", kind=_Enumeration),
}
_STORED_METADATA: Any = _CLASSES["torch.distributed.checkpoint.metadata"]["Metadata"]
_STORED_TENSOR: Any = _CLASSES["torch.distributed.checkpoint.metadata"]["TensorStorageMetadata"]
_CLASSES["megatron.core.dist_checkpointing.strategies.torch"] = {  # of megatron-core up to 0.15
    "MCoreMetadata": type("MCoreMetadata", (_STORED_METADATA,), {}),
    **_records("MCoreSavePlan"),
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): record for module, names in _CLASSES.items() for name, record in names.items()},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,  # Python 3.13's name of it
}


def find_checkpoint(path: Path) -> Path:
    """Find the torch_dist folder of a path: itself, its latest iteration, or a NeMo folder's weights."""
    with reading(path, "a torch_dist checkpoint", "check its name and mode"):
        return _find(path)


def _find(path: Path) -> Path:
    nemo.refuse_archive(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a Megatron checkpoint")
    for folder in (path, path / "policy" / "weights", path / "weights"):
        if (folder / METADATA).exists():
            return folder
        latest = folder / LATEST
        whole = sorted(found.parent for found in folder.glob(f"iter_*/{METADATA}"))
        if (folder / RELEASE / METADATA).exists():
            whole.append(folder / RELEASE)
        if latest.exists() and (name := _latest_name(latest)) is not None:
            if folder / name in whole:
                return folder / name
            if whole:
                raise UserError(
                    f"{latest} names {name}, which is not there or not whole; copy it again, or give the "
                    "folder of another one"
                )
        if len(whole) > 1:
            names = ", ".join(found.name for found in whole)
            raise UserError(f"{folder} holds several iterations ({names}); give the folder of one")
        if whole:
            return whole[0]
    for file in (path / "metadata.json", path / "weights" / "metadata.json"):
        if file.is_file() and b'"zarr"' in file.read_bytes():
            raise UserError(f"{file.parent} is in the zarr format; save it again as torch_dist")
    raise UserError(
        f"{path} holds no torch_dist checkpoint (a folder with {METADATA}); give iter_NNNNNNN or the folder "
        "above it"
    )


def _latest_name(latest: Path) -> str | None:
    """Read the folder that a tracker's file names, ``iter_NNNNNNN`` or ``release``; None: neither."""
    with reading(latest, "a text with an iteration's number", "restore it, or give the folder iter_NNNNNNN"):
        text = latest.read_text(encoding="utf-8").strip()
    if text == RELEASE:
        return RELEASE
    return f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,9}", text) else None


@dataclass(frozen=True)
class Chunk:
    """A stored block of a key. Attributes: offsets, sizes: within the key.  file, start, length: where."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Key:
    """A stored tensor, all layers of it. Attributes: shape; dtype; chunks."""

    shape: tuple[int, ...]
    dtype: Dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)


class TorchDistReader:
    """Reads blocks of a checkpoint's tensors. Attributes: folder; keys: all tensors, optimizer's too."""

    def __init__(self, path: Path) -> None:
        """Read ``.metadata`` and check that every file is as long as it says."""
        self.folder = find_checkpoint(path)
        self.keys, ends = _read_metadata(self.folder)
        for name, end in ends.items():
            _check_file(self.folder, name, end)
        used = {chunk.file for key in self.weights.values() for chunk in key.chunks}
        self._descriptors = open_all(self.folder / name for name in used)

    @property
    def weights(self) -> dict[str, Key]:
        """The model's tensors, without optimizer, random state and scales."""
        return {name: key for name, key in self.keys.items() if not _NO_WEIGHTS.fullmatch(name)}

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizer's state was saved with the weights."""
        return any(_OPTIMIZER.fullmatch(name) for name in self.keys)

    @contextmanager
    def block(self, name: str, start: Sequence[int], sizes: Sequence[int], axis: int) -> Iterator[Block]:
        """Open a block of a key, to be read row by row. Leaving it compares the checksums.

        Args: start, sizes: of the block, one number per axis of the key: 1 before the rows' axis, all of
              the key after it.
              axis: of the rows.
        """
        key = self.keys[name]
        assert all(size == 1 for size in sizes[:axis]), sizes
        assert tuple(sizes[axis + 1 :]) == key.shape[axis + 1 :], sizes
        overlaps = [(chunk, box) for chunk in key.chunks if (box := _overlap(chunk, start, sizes))]
        if sum(math.prod(end - begin for begin, end in box) for _, box in overlaps) != math.prod(sizes):
            raise UserError(f"{self.folder}: {name} has gaps or overlaps at {list(start)}; save it again")
        if any(chunk.sizes[axis + 2 :] != key.shape[axis + 2 :] for chunk, _ in overlaps):
            raise UserError(f"{self.folder}: {name} is split along an inner axis; save it from one rank")
        parts = [_Part(self._open(chunk, key), chunk, box, axis) for chunk, box in overlaps]
        yield Block(key.dtype, parts, start[axis], math.prod(sizes[axis + 1 :]) * key.dtype.itemsize)
        for part in parts:
            part.saved.finish()

    def _open(self, chunk: Chunk, key: Key) -> SavedTensor:
        file = self.folder / chunk.file
        saved = SavedTensor(file, self._descriptors[file], chunk.start, chunk.length)
        if (saved.dtype, saved.shape) != (key.dtype, chunk.sizes):
            raise damaged(
                file,
                f"the chunk at byte {chunk.start} is {saved.dtype} {list(saved.shape)}, {METADATA} says "
                f"{key.dtype} {list(chunk.sizes)}",
            )
        return saved

    def read(self, name: str, start: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a whole block into memory; its first axis longer than 1 is the rows'. See `block`.

        Returns: [sizes] in the stored dtype.
        """
        axis = next((axis for axis, size in enumerate(sizes) if size > 1), max(0, len(sizes) - 1))
        data = bytearray(num_bytes_of(self.keys[name].dtype, sizes))
        with self.block(name, start, sizes, axis) as block:
            block.read_into(memoryview(data), math.prod(sizes[axis : axis + 1]))
        return tensor_of(data, block.dtype, sizes)

    def close(self) -> None:
        close_all(self._descriptors)


class Block:
    """Rows of a key, joined from however many chunks they lie in. Attributes: dtype."""

    def __init__(self, dtype: Dtype, parts: list[_Part], row: int, row_bytes: int) -> None:
        self.dtype = dtype
        self._parts, self._row, self._row_bytes, self._buffer = parts, row, row_bytes, Buffer()

    def read(self, num_rows: int) -> memoryview:
        """Return the next rows; valid until the next call."""
        data = self._buffer.take(num_rows * self._row_bytes)
        self.read_into(data, num_rows)
        return data

    def read_into(self, data: memoryview, num_rows: int) -> None:
        """Fill ``data`` with the next rows."""
        for part in self._parts:
            part.read_into(data, self._row, num_rows, self._row_bytes)
        self._row += num_rows


class _Part:
    """Rows ``begin`` to ``end`` of a key, perhaps some columns, that a block takes from one chunk."""

    def __init__(self, saved: SavedTensor, chunk: Chunk, box: list[tuple[int, int]], axis: int) -> None:
        self.saved, (self.begin, self.end) = saved, box[axis]
        itemsize = saved.dtype.itemsize
        self.width = math.prod(chunk.sizes[axis + 1 :]) * itemsize
        self.left = sum(chunk.offsets[axis + 1 :]) * math.prod(chunk.sizes[axis + 2 :]) * itemsize
        above = 0  # the chunk's rows above row 0 of the key, in units of rows
        for (first, _), offset, size in zip(box[:axis], chunk.offsets, chunk.sizes, strict=False):
            above = above * size + first - offset
        self.above = above * chunk.sizes[axis] - chunk.offsets[axis] if chunk.sizes else 0

    def read_into(self, data: memoryview, row: int, num_rows: int, row_bytes: int) -> None:
        """Fill the part's share of ``data``, which holds rows ``row`` and following of the key."""
        begin, end = max(row, self.begin), min(row + num_rows, self.end)
        if begin >= end:
            return
        first = (begin - row) * row_bytes + self.left
        if self.width == row_bytes:
            views = [data[first : first + (end - begin) * row_bytes]]
        else:
            starts = range(first, first + (end - begin) * row_bytes, row_bytes)
            views = [data[start : start + self.width] for start in starts]
        self.saved.read_into((begin + self.above) * self.width, views)


def _overlap(chunk: Chunk, start: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (begin, end) per axis of what a chunk and a block have in common; None: nothing."""
    box = [
        (max(o, b), min(o + n, b + m))
        for o, n, b, m in zip(chunk.offsets, chunk.sizes, start, sizes, strict=True)
    ]
    return box if all(begin < end for begin, end in box) else None


def _read_metadata(folder: Path) -> tuple[dict[str, Key], dict[str, int]]:
    """Read the tensors, and the length that each file must have at least."""
    path = folder / METADATA
    try:
        allowed = _ALLOWED | {("builtins", "getattr"): partial(_member_of, str(path))}
        found = load_guarded(path, allowed)
        if not isinstance(found, _STORED_METADATA):
            raise damaged(path, "it holds no torch_dist metadata")
        places = {(i.fqn, tuple(i.offset)): v for i, v in found.storage_data.items() if hasattr(i, "offset")}
        tensors = {
            name: stored
            for name, stored in found.state_dict_metadata.items()
            if isinstance(stored, _STORED_TENSOR)
        }
        ends: dict[str, int] = collections.defaultdict(int)
        for place in found.storage_data.values():
            ends[str(place.relative_path)] = max(ends[str(place.relative_path)], place.offset + place.length)
        keys = {nemo.without_wrappers(name): _key(name, stored, places) for name, stored in tensors.items()}
        return keys, ends
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def _key(name: str, stored: Any, places: Mapping[Any, Any]) -> Key:
    chunks = []
    for chunk in stored.chunks:
        place = places[name, tuple(chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise UserError(f"{name} is stored with {place.transform_descriptors}; save it uncompressed")
        start, length = _sizes((place.offset, place.length))
        chunks.append(
            Chunk(_sizes(chunk.offsets), _sizes(chunk.sizes), str(place.relative_path), start, length)
        )
    shape, dtype = _sizes(stored.size), stored.properties.dtype
    if not isinstance(dtype, Dtype) or any(len(one.sizes) != len(shape) for one in chunks):
        raise ValueError(f"{name!r:.60} has chunks of another rank, or no dtype")
    if any(len(one.offsets) != len(shape) for one in chunks):
        raise ValueError(f"{name!r:.60} has chunks at places of another rank")
    return Key(shape, dtype, tuple(chunks))


def _sizes(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in found):
        raise ValueError(f"{found!r:.60} are no sizes")
    return found


def _check_file(folder: Path, name: str, end: int) -> None:
    file = folder / name
    if Path(name).name != name:
        raise UserError(f"{folder / METADATA} points outside the checkpoint ({name!r}); it was not read")
    if not file.exists():
        raise UserError(f"{file} is missing; copy the whole checkpoint folder")
    if file.stat().st_size < end:
        raise damaged(file, f"it has {file.stat().st_size} bytes, {METADATA} says {end}")
