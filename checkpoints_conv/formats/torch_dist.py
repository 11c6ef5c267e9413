"""Reading of Megatron's torch_dist checkpoints, chunk by chunk, without megatron or process groups.

A folder holds ``.metadata`` (which key has which chunks, and where they lie), ``*.distcp`` files (one saved
tensor after the other), ``common.pt`` and ``metadata.json``. Decoder layers are stacked: axis 0 of
``decoder.layers.<name>`` is the layer, axis 1 of expert weights the expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_conv.formats.archive import SavedTensor
from checkpoints_conv.formats.dtypes import Dtype, num_bytes_of, tensor_of
from checkpoints_conv.formats.metadata import METADATA, Chunk, Key, read_metadata
from checkpoints_conv.formats.pieces import Buffer, close_all, damaged, open_all
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import UserError, reading

if TYPE_CHECKING:
    from torch import Tensor

LATEST = "latest_checkpointed_iteration.txt"
"""Tracker: file that names the latest iteration of a checkpoint's parent folder."""
RELEASE = "release"
"""Name in place of an iteration's, in the folder and the tracker, for a model that was not trained here."""
_NO_WEIGHTS = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state|common_state|opt_param)\b.*|.*_extra_state.*"
)
"""Keys of a training's state and of FP8's scales."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..*")


def find_checkpoint(path: Path) -> Path:
    """Find the torch_dist folder at a path: the path itself, its latest iteration, or a NeMo checkpoint's."""
    with reading(path, "a torch_dist checkpoint", "check its name and mode"):
        return _find(path)


def _find(path: Path) -> Path:
    nemo.refuse_archive(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a Megatron checkpoint")
    for folder in (path, path / "policy" / "weights", path / "weights"):
        if (folder / METADATA).exists():
            return folder
        iteration = _latest_iteration(folder)
        if iteration is not None:
            return iteration
    for file in (path / "metadata.json", path / "weights" / "metadata.json"):
        if file.is_file() and b'"zarr"' in file.read_bytes():
            raise UserError(f"{file.parent} is in the zarr format; save it again as torch_dist")
    raise UserError(
        f"{path} holds no torch_dist checkpoint (a folder with {METADATA}); give iter_NNNNNNN or the folder "
        "above it"
    )


def _latest_iteration(folder: Path) -> Path | None:
    """Return the iteration that the tracker names, else the only one, or None if the folder has none."""
    # `.metadata` is written last, so a folder without it was left by an interrupted save.
    whole_iterations = sorted(metadata.parent for metadata in folder.glob(f"iter_*/{METADATA}"))
    if (folder / RELEASE / METADATA).exists():
        whole_iterations.append(folder / RELEASE)
    tracker = folder / LATEST
    latest_name = _latest_name(tracker) if tracker.exists() else None
    if not whole_iterations:
        return None
    if latest_name is None:
        if len(whole_iterations) == 1:
            return whole_iterations[0]
        names = ", ".join(iteration.name for iteration in whole_iterations)
        raise UserError(f"{folder} holds several iterations ({names}); give the folder of one")
    latest = folder / latest_name
    if latest not in whole_iterations:
        raise UserError(
            f"{tracker} names {latest_name}, which is not there or not whole; copy it again, or give the "
            "folder of another one"
        )
    return latest


def _latest_name(latest: Path) -> str | None:
    """Return the folder that a tracker names, ``iter_NNNNNNN`` or ``release``; None for any other content."""
    with reading(latest, "a text with an iteration's number", "restore it, or give the folder iter_NNNNNNN"):
        content = latest.read_text(encoding="utf-8").strip()
    if content == RELEASE:
        return RELEASE
    if re.fullmatch(r"[0-9]{1,9}", content):
        return f"iter_{int(content):07d}"
    return None


class TorchDistReader:
    """Reads blocks of a checkpoint's tensors.

    Attributes:
        folder: folder with ``.metadata``.
        keys: name -> stored tensor, for the model and the optimizer.
    """

    def __init__(self, path: Path) -> None:
        """Read ``.metadata``, and check that no file is shorter than its chunks need."""
        self.folder = find_checkpoint(path)
        self.keys, file_ends = read_metadata(self.folder)
        for file_name, end in file_ends.items():
            _check_file(self.folder, file_name, end)
        # Files with the optimizer's state alone stay closed.
        weight_files = {chunk.file for key in self.weights.values() for chunk in key.chunks}
        self._descriptors = open_all(self.folder / file_name for file_name in weight_files)

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
        """Open a block of a key, to read its rows in order. Leaving the context compares the checksums.

        Args:
            name: the key.
            start: the block's first index on each axis of the key.
            sizes: the block's length on each axis: 1 before the rows' axis, the key's length after it.
            axis: the rows' axis.
        """
        key = self.keys[name]
        assert all(size == 1 for size in sizes[:axis]), sizes
        assert tuple(sizes[axis + 1 :]) == key.shape[axis + 1 :], sizes
        overlaps = []
        num_values = 0
        for chunk in key.chunks:
            box = _overlap(chunk, start, sizes)
            if box is not None:
                overlaps.append((chunk, box))
                num_values += math.prod(end - begin for begin, end in box)
        if num_values != math.prod(sizes):
            raise UserError(f"{self.folder}: {name} has gaps or overlaps at {list(start)}; save it again")
        # Tensor parallelism splits rows, or the columns within rows, but no further axis.
        if any(chunk.sizes[axis + 2 :] != key.shape[axis + 2 :] for chunk, _ in overlaps):
            raise UserError(f"{self.folder}: {name} is split along an inner axis; save it from one rank")
        parts = [_Part(self._open(chunk, key), chunk, box, axis) for chunk, box in overlaps]
        row_bytes = math.prod(sizes[axis + 1 :]) * key.dtype.itemsize
        yield Block(key.dtype, parts, start[axis], row_bytes)
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
        """Read a whole block into memory. The arguments are those of `block`.

        The first axis longer than 1 is that of the rows.

        Returns: [sizes] in the stored dtype.
        """
        longer_axes = [axis for axis, size in enumerate(sizes) if size > 1]
        last_axis = max(0, len(sizes) - 1)
        rows_axis = longer_axes[0] if longer_axes else last_axis
        num_rows = sizes[rows_axis] if sizes else 1
        data = bytearray(num_bytes_of(self.keys[name].dtype, sizes))
        with self.block(name, start, sizes, rows_axis) as block:
            block.read_into(memoryview(data), num_rows)
        return tensor_of(data, block.dtype, sizes)

    def close(self) -> None:
        close_all(self._descriptors)


class Block:
    """Rows of a key, which may lie in several chunks. They are read in order.

    Attributes: dtype: dtype of the key.
    """

    def __init__(self, dtype: Dtype, parts: list[_Part], row: int, row_bytes: int) -> None:
        self.dtype = dtype
        self._parts = parts
        self._row = row
        self._row_bytes = row_bytes
        self._buffer = Buffer()

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
    """The part of a block that lies in one chunk: some of its rows, perhaps with only some columns.

    Attributes:
        saved: tensor of the chunk.
        begin: first row of the part in the key.
        end: row after the last row of the part.
    """

    def __init__(self, saved: SavedTensor, chunk: Chunk, box: list[tuple[int, int]], axis: int) -> None:
        """Compute the place of the part in its chunk, and in the rows of the block.

        Args:
            saved: tensor of the chunk.
            chunk: place of the chunk in the key.
            box: (begin, end) of the part on each axis of the key.
            axis: axis of the rows.
        """
        self.saved = saved
        self.begin, self.end = box[axis]
        itemsize = saved.dtype.itemsize
        self._width = math.prod(chunk.sizes[axis + 1 :]) * itemsize
        # Tensor parallelism can split the columns. Those of this chunk then begin within a row of the key.
        values_per_column = math.prod(chunk.sizes[axis + 2 :])
        self._first_column_byte = sum(chunk.offsets[axis + 1 :]) * values_per_column * itemsize
        # A chunk may hold several stacked layers or experts. Rows of earlier ones precede those of the part.
        layer = 0
        for (first, _), offset, size in zip(box[:axis], chunk.offsets, chunk.sizes, strict=False):
            layer = layer * size + first - offset
        self._rows_before = layer * chunk.sizes[axis] - chunk.offsets[axis] if chunk.sizes else 0

    def read_into(self, data: memoryview, row: int, num_rows: int, row_bytes: int) -> None:
        """Fill the part's share of ``data``, whose first row is row ``row`` of the key."""
        begin = max(row, self.begin)
        end = min(row + num_rows, self.end)
        if begin >= end:
            return
        first_byte = (begin - row) * row_bytes + self._first_column_byte
        end_byte = first_byte + (end - begin) * row_bytes
        if self._width == row_bytes:
            views = [data[first_byte:end_byte]]
        else:
            row_starts = range(first_byte, end_byte, row_bytes)
            views = [data[start : start + self._width] for start in row_starts]
        self.saved.read_into((begin + self._rows_before) * self._width, views)


def _overlap(chunk: Chunk, start: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (begin, end) per axis of the intersection of a chunk and a block; None: it is empty."""
    box = []
    for chunk_start, chunk_size, block_start, block_size in zip(
        chunk.offsets, chunk.sizes, start, sizes, strict=True
    ):
        begin = max(chunk_start, block_start)
        end = min(chunk_start + chunk_size, block_start + block_size)
        if begin >= end:
            return None
        box.append((begin, end))
    return box


def _check_file(folder: Path, name: str, end: int) -> None:
    file = folder / name
    if Path(name).name != name:
        raise UserError(f"{folder / METADATA} points outside the checkpoint ({name!r}); it was not read")
    if not file.exists():
        raise UserError(f"{file} is missing; copy the whole checkpoint folder")
    if file.stat().st_size < end:
        raise damaged(file, f"it has {file.stat().st_size} bytes, {METADATA} says {end}")
