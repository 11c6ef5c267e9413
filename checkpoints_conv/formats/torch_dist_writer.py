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
from checkpoints_conv.formats.metadata import METADATA, Chunk
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
    """A chunk that is on disk; a line of the journal.

    Attributes:
        key: key of which the chunk is a part.
        shape: shape of the key.
        dtype: name of the key's dtype.
        chunk: place of the chunk in the key and in its file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Restore a chunk from its line of the journal, which is ``asdict`` of it as JSON."""
        fields = entry["chunk"]
        chunk = Chunk(
            offsets=tuple(fields["offsets"]),
            sizes=tuple(fields["sizes"]),
            file=fields["file"],
            start=fields["start"],
            length=fields["length"],
        )
        return cls(entry["key"], tuple(entry["shape"]), entry["dtype"], chunk)


class TorchDistWriter:
    """Appends chunks to data files, from several threads, and writes the metadata at the end."""

    def __init__(self, folder: Path, num_files: int) -> None:
        """Open data files beside those of interrupted attempts.

        Args:
            folder: the checkpoint's folder.
            num_files: number of files, one per thread that writes.
        """
        self.folder = folder
        # Names are __NUMBER_ATTEMPT.distcp. Each attempt takes new names, so that no earlier file is changed.
        earlier_attempts = {path.stem.rpartition("_")[2] for path in folder.glob("__*_*.distcp")}
        attempt = len(earlier_attempts)
        self._files = [_DataFile(folder / f"__{number}_{attempt}.distcp") for number in range(num_files)]
        self._idle: queue.SimpleQueue[_DataFile] = queue.SimpleQueue()
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

        Args:
            key: key of which the chunk is a part.
            shape: shape of the key.
            dtype: dtype of the key.
            offsets: first index of the chunk on each axis of the key.
            sizes: length of the chunk on each axis of the key.
            pieces: bytes of the chunk.

        Returns: the written chunk, for the journal and for `finish`.
        """
        file = self._idle.get()
        try:
            start, length = file.append(TensorReference(dtype, sizes, "0"), {"0": pieces})
        finally:
            self._idle.put(file)
        return WrittenChunk(key, shape, dtype.name, Chunk(offsets, sizes, file.path.name, start, length))

    def finish(self, written: Sequence[WrittenChunk], objects: Sequence[str], iteration: int) -> None:
        """Write the metadata and the side files of megatron-core.

        Args:
            written: every chunk of the checkpoint, those of interrupted attempts included.
            objects: keys under which None is stored, where Transformer Engine looks for its extra states.
            iteration: number of the iteration.
        """
        file = self._idle.get()
        places = {}
        for name in objects:
            # megatron-core stores an object as the list of its shards, here one shard, which is None.
            start, length = file.append([None])
            places[name] = (file.path.name, start, length)
        self._idle.put(file)
        # `.metadata` comes last: a checkpoint without it is recognised as unfinished.
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
    """One ``.distcp`` file, to which archives are appended.

    Attributes:
        path: path of the file.
        descriptor: descriptor of the file; -1 once it is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def append(
        self, tree: Any, data: Mapping[str, Iterable[bytes | memoryview]] | None = None
    ) -> tuple[int, int]:
        """Append an archive, and return its first byte in the file and its length."""
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
    """Build the torch object that is pickled as ``.metadata``.

    Args:
        written: chunks of the tensors.
        objects: key of each object -> its file, first byte and length.
    """
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
    for written_chunk in written:
        key = written_chunk.key
        chunk = written_chunk.chunk
        offsets = torch.Size(chunk.offsets)
        if key not in keys:
            properties = TensorProperties(DTYPES[written_chunk.dtype].torch)
            keys[key] = TensorStorageMetadata(properties, torch.Size(written_chunk.shape), [])
        keys[key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        places[MetadataIndex(key, offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    for name, place in objects.items():
        keys[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(*place)
    return Metadata(keys, storage_data=places)


def chunk_is_whole(folder: Path, written: WrittenChunk) -> bool:
    """Return True if a chunk of an interrupted attempt can be read and matches its checksum."""
    path = folder / written.chunk.file
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        saved = SavedTensor(path, descriptor, written.chunk.start, written.chunk.length)
        saved.finish()
    except UserError:
        return False
    finally:
        os.close(descriptor)
    return saved.shape == written.chunk.sizes
