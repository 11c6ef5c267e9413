"""The file ``.metadata`` of torch_dist checkpoints: which key has which chunks, and where they lie.

It is a pickle of classes of torch.distributed.checkpoint. Reading it must run no code, and importing those
classes would take a second, so classes of our own stand for them and every other name is refused.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import DTYPES, Dtype, num_bytes_of
from checkpoints_conv.formats.pickles import load_guarded, refused
from checkpoints_conv.formats.pieces import damaged
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import UserError

METADATA = ".metadata"
"""File that says which key has which chunks."""


@dataclass(frozen=True)
class Chunk:
    """A stored block of a key.

    Attributes:
        offsets: first index on each axis of the key.
        sizes: length on each axis of the key.
        file: name of the file that holds it.
        start: first byte in the file.
        length: bytes in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Key:
    """A stored tensor. If layers are stacked, it holds all of them.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor.
        chunks: blocks of the tensor, one or more from each rank that saved.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)


class _Record:
    """Holds the fields of an object in the metadata's pickle, in place of the object's real class."""

    def __setstate__(self, state: Any) -> None:
        # TensorProperties, whose dtype comes first, is the one class that keeps no names.
        self.__dict__.update(state if isinstance(state, dict) else {"dtype": state[0]})


class _Enumeration(_Record):
    """Stands for a member of an enumeration. Its value is not needed here."""

    def __init__(self, _member: Any) -> None:
        """Take the member's value, or from `_member_of` its name."""


def _record(name: str, base: type[_Record] = _Record) -> Any:
    """Make a class that stands for one of torch's or Megatron's in the pickle."""
    return type(name, (base,), {})


def _member_of(file: str, owner: Any, name: Any) -> _Enumeration:
    """Stand for ``getattr``, by which Python 3.11.2 (Debian 12) pickles a member of an enumeration.

    Args:
        file: the file's name, for messages.
        owner: object of which the pickle asks for an attribute; only our enumerations are allowed.
        name: the attribute.
    """
    if not (isinstance(owner, type) and issubclass(owner, _Enumeration)):
        raise refused(file, f"an attribute ({name!r})")
    return owner(name)


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA_RECORD = _record("Metadata")
_TENSOR_RECORD = _record("TensorStorageMetadata")
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA_MODULE, "BytesStorageMetadata"): _record("BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"): _record("ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"): _METADATA_RECORD,
    (_METADATA_MODULE, "MetadataIndex"): _record("MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"): _record("StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"): _record("TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"): _TENSOR_RECORD,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _record("_MEM_FORMAT_ENCODING", _Enumeration),
    (_FILESYSTEM_MODULE, "_StorageInfo"): _record("_StorageInfo"),
    (_FILESYSTEM_MODULE, "_StoragePrefix"): _record("_StoragePrefix"),
    (_PLANNER_MODULE, "BytesIOWriteData"): _record("BytesIOWriteData"),
    (_PLANNER_MODULE, "SavePlan"): _record("SavePlan"),
    (_PLANNER_MODULE, "TensorWriteData"): _record("TensorWriteData"),
    (_PLANNER_MODULE, "WriteItem"): _record("WriteItem"),
    (_PLANNER_MODULE, "WriteItemType"): _record("WriteItemType", _Enumeration),
    # megatron-core up to 0.15 writes its own subclasses.
    (_MEGATRON_MODULE, "MCoreMetadata"): _record("MCoreMetadata", _METADATA_RECORD),
    (_MEGATRON_MODULE, "MCoreSavePlan"): _record("MCoreSavePlan"),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    # Python 3.13's name for the same class.
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}
_ALLOWED |= {("torch", name): dtype for name, dtype in DTYPES.items()}
"""Names that ``.metadata`` may ask for -> the objects that stand for them."""


def read_metadata(folder: Path) -> tuple[dict[str, Key], dict[str, int]]:
    """Read the tensors, and the length that each file must have at least."""
    path = folder / METADATA
    try:
        allowed = _ALLOWED | {("builtins", "getattr"): partial(_member_of, str(path))}
        metadata = load_guarded(path, allowed)
        if not isinstance(metadata, _METADATA_RECORD):
            raise damaged(path, "it holds no torch_dist metadata")
        file_ends = _file_ends(metadata)
        return _keys(metadata), file_ends
    except UserError:
        raise
    except Exception as error:
        # A damaged pickle can fail in any way.
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def _keys(metadata: Any) -> dict[str, Key]:
    """Read the tensors by name."""
    places = {}
    for index, place in metadata.storage_data.items():
        # Objects that are no tensors have no offset.
        if hasattr(index, "offset"):
            places[index.fqn, tuple(index.offset)] = place
    keys = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, _TENSOR_RECORD):
            keys[nemo.without_wrappers(name)] = _key(name, stored, places)
    return keys


def _file_ends(metadata: Any) -> dict[str, int]:
    """Return the byte after the last one that is used, of each file."""
    ends: dict[str, int] = collections.defaultdict(int)
    for place in metadata.storage_data.values():
        file_name = str(place.relative_path)
        ends[file_name] = max(ends[file_name], place.offset + place.length)
    return ends


def _key(name: str, stored: Any, places: Mapping[Any, Any]) -> Key:
    """Read one tensor.

    Args:
        name: its name.
        stored: the metadata's entry.
        places: name and offsets of a chunk -> its place.
    """
    chunks = []
    for chunk in stored.chunks:
        place = places[name, tuple(chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise UserError(f"{name} is stored with {place.transform_descriptors}; save it uncompressed")
        start, length = _sizes((place.offset, place.length))
        chunks.append(
            Chunk(
                offsets=_sizes(chunk.offsets),
                sizes=_sizes(chunk.sizes),
                file=str(place.relative_path),
                start=start,
                length=length,
            )
        )
    shape = _sizes(stored.size)
    dtype = stored.properties.dtype
    if not isinstance(dtype, Dtype) or any(len(chunk.sizes) != len(shape) for chunk in chunks):
        raise ValueError(f"{name!r:.60} has chunks of another rank, or no dtype")
    if any(len(chunk.offsets) != len(shape) for chunk in chunks):
        raise ValueError(f"{name!r:.60} has chunks at places of another rank")
    return Key(shape, dtype, tuple(chunks))


def _sizes(numbers: Any) -> tuple[int, ...]:
    """Check numbers of a pickle, which can be anything, and return them."""
    sizes = tuple(numbers)
    # 2 ** 60 is above any size, and sums and products of few such numbers stay small enough to compute.
    if not all(type(size) is int and 0 <= size < 1 << 60 for size in sizes):
        raise ValueError(f"{sizes!r:.60} are no sizes")
    return sizes
