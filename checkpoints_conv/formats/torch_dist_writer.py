"""Writing torch_dist checkpoints chunk by chunk; `torch_dist` describes the format."""

from __future__ import annotations

import json
import os
import pickle
import queue
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from checkpoints_conv.formats.archive import SavedTensor, Section, TensorReference, save
from checkpoints_conv.formats.dtypes import DTYPES, Dtype
from checkpoints_conv.formats.torch_dist import METADATA, Chunk
from nemo_grpo.core.lazy import torch
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk that is on disk; a line of the journal. Attributes: its key, and the key's shape and dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Restore a chunk from ``asdict`` after JSON."""
        c = entry["chunk"]
        chunk = Chunk(tuple(c["offsets"]), tuple(c["sizes"]), c["file"], c["start"], c["length"])
        return cls(entry["key"], tuple(entry["shape"]), entry["dtype"], chunk)


class TorchDistWriter:
    """Appends chunks to data files, from several threads, and writes the metadata at the end."""

    def __init__(self, folder: Path, num_files: int) -> None:
        """Open data files beside those that an interrupted attempt has left."""
        self.folder = folder
        attempt = len({path.stem.rpartition("_")[2] for path in folder.glob("__*_*.distcp")})
        self._idle: queue.SimpleQueue[_DataFile] = queue.SimpleQueue()
        self._files = [_DataFile(folder / f"__{n}_{attempt}.distcp") for n in range(num_files)]
        for file in self._files:
            self._idle.put(file)

    @property
    def descriptors(self) -> list[int]:
        return [file.descriptor for file in self._files]

    def write(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: Dtype,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        pieces: Iterable[bytes | memoryview],
    ) -> WrittenChunk:
        """Append one chunk.

        Args:    shape: of the whole key.  offsets, sizes: of the chunk.  pieces: the chunk's bytes.
        Returns: where it is, for the journal and for `finish`.
        """
        file = self._idle.get()
        try:
            start, length = file.append(TensorReference(dtype, sizes, "0"), {"0": pieces})
        finally:
            self._idle.put(file)
        return WrittenChunk(key, shape, dtype.name, Chunk(offsets, sizes, file.path.name, start, length))

    def finish(self, written: Sequence[WrittenChunk], objects: Sequence[str], iteration: int) -> None:
        """Write the metadata and the side files of megatron-core.

        Args: objects: keys of objects that are None (Transformer Engine's extra states, which it looks for).
        """
        file = self._idle.get()
        places = {}
        for name in objects:
            start, length = file.append([None])  # megatron-core stores the list of an object's shards
            places[name] = (file.path.name, start, length)
        self._idle.put(file)
        self.close()
        with (self.folder / "common.pt").open("wb") as stream:
            save(stream, {"checkpoint_version": 3.0, "iteration": iteration})
        (self.folder / "metadata.json").write_text(json.dumps(_BACKEND))
        (self.folder / METADATA).write_bytes(pickle.dumps(_metadata(written, places)))

    def close(self) -> None:
        """Close the data files and remove those without content."""
        for file in self._files:
            file.close()


class _DataFile:
    """One ``.distcp`` file that grows. Attributes: path; descriptor."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def append(
        self, tree: Any, data: Mapping[str, Iterable[bytes | memoryview]] | None = None
    ) -> tuple[int, int]:
        """Write an archive. Returns: where it starts, and its length."""
        section = Section(self.descriptor, self._end)
        save(section, tree, data)
        self._end += section.length
        return section.start, section.length

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            if not self._end:
                self.path.unlink()


def _metadata(written: Iterable[WrittenChunk], objects: Mapping[str, tuple[str, int, int]]) -> Metadata:
    """Build torch's Metadata. Args: objects: places of keys that are no tensors."""
    # Imported here: reading a checkpoint needs no torch, which takes seconds.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    keys: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for one in written:
        chunk = one.chunk
        offsets = torch.Size(chunk.offsets)
        if one.key not in keys:
            properties = TensorProperties(DTYPES[one.dtype].torch)
            keys[one.key] = TensorStorageMetadata(properties, torch.Size(one.shape), [])
        keys[one.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        places[MetadataIndex(one.key, offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    for name, place in objects.items():
        keys[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(*place)
    return Metadata(keys, storage_data=places)


def chunk_is_whole(folder: Path, one: WrittenChunk) -> bool:
    """True if the chunk of an interrupted attempt can be read and matches its checksum."""
    path = folder / one.chunk.file
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        saved = SavedTensor(path, descriptor, one.chunk.start, one.chunk.length)
        saved.finish()
    except UserError:
        return False
    finally:
        os.close(descriptor)
    return saved.shape == one.chunk.sizes
