"""Hugging Face safetensors to a Megatron torch_dist checkpoint, a megabyte in memory per worker."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_conv.formats.dtypes import (
    WEIGHT_DTYPES,
    Dtype,
    byte_view,
    cast,
    cast_tensor,
    dtype_for,
    main_dtype,
    widened,
)
from checkpoints_conv.formats.pieces import PIECE_BYTES, Buffer
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter, WrittenChunk, chunk_is_whole
from checkpoints_conv.job import Job, flush_behind, run_parallel
from checkpoints_conv.locate import open_model
from checkpoints_conv.run_config import write_bridge_files
from nemo_grpo.models import Family
from nemo_grpo.models.units import Unit
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.progress import Advance, progress

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ITERATION = 0
"""Iteration of the checkpoint, as Megatron-Bridge numbers an import."""
# The part before `.weight` is the layer's name. Qwen3.5's in_proj is stored in parts; only `.query` of them
# matches, so that the layer counts once.
_IN_TRANSFORMER_ENGINE = re.compile(r"(.*\.(linear_\w+|\w*norm|in_proj|out_proj))\.weight(\.query)?")


def hf_to_megatron(
    hf_model: str | Path,
    output: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    num_workers: int = 2,
    padded_vocab_size: int | None = None,
    resume: bool = False,
    force: bool = False,
    sha256: bool = False,
) -> Path:
    """Convert a model folder; peak memory is a few megabytes per worker, besides torch.

    Args:
        hf_model: folder with config.json and safetensors files.
        output: folder to create.
        dtype: dtype of the result (bf16, fp16, fp32); None keeps the source's.
        num_workers: threads.
        padded_vocab_size: number of rows of the embeddings; None: no padding, because megatron-core pads
            when it loads the checkpoint.
        resume: finish an interrupted call.
        force: replace an existing output.
        sha256: also write ``SHA256SUMS``.

    Returns: ``output``, which holds ``iter_0000000`` and the files by which Megatron-Bridge finds it.
    """
    hf_model = Path(hf_model)
    output = Path(output)
    with open_model(hf_model) as (family, weights):
        result_dtype = dtype_for(dtype)
        conversion = _Conversion(family, weights, result_dtype, padded_vocab_size)
        settings = {
            "direction": "hf-to-megatron",
            "dtype": str(result_dtype),
            "padded_vocab_size": padded_vocab_size,
        }
        with Job(output, hf_model, settings, resume, force) as job:
            conversion.run(job, num_workers)
            write_bridge_files(job.data, family, conversion.main_dtype(), ITERATION)
            job.finish(sha256)
    log.info("%s is a Megatron checkpoint of %s", output, hf_model)
    return output


Place = tuple[str, tuple[int, ...]]
"""Key and offsets of a chunk in a checkpoint."""


class _Conversion:
    """Conversion of one model. Creating it checks the options and the tensors' dtypes; `run` writes."""

    def __init__(
        self, family: Family, weights: SafetensorsFolder, dtype: Dtype | None, padded_vocab_size: int | None
    ) -> None:
        self.family = family
        self.weights = weights
        self.units = list(family.units())
        self.dtypes = _dtypes_by_key(self.units, weights, dtype)
        self.padded_vocab_size = padded_vocab_size
        if padded_vocab_size is not None and padded_vocab_size < family.dims["v"]:
            raise UserError(
                f"--padded-vocab-size {padded_vocab_size} is below vocab_size={family.dims['v']}; raise it"
            )

    def main_dtype(self) -> Dtype:
        """Return the dtype that most of the result's bytes have."""
        return main_dtype((unit.storage.key, self._dtype(unit), unit.shape) for unit in self.units)

    def run(self, job: Job, num_workers: int) -> None:
        """Write every chunk that an interrupted attempt did not finish, and the metadata."""
        folder = job.data / f"iter_{ITERATION:07d}"
        folder.mkdir(exist_ok=True)
        written = [WrittenChunk.from_json(entry) for entry in job.journal]
        written = [chunk for chunk in written if chunk_is_whole(folder, chunk)]
        written_places = {_place_of(chunk) for chunk in written}
        units = [unit for unit in self.units if self._place(unit) not in written_places]

        # A unit is written under the keys of its twins first, and then under its own. If the last one is
        # missing, all are written again, and the metadata must not list the chunks of the first attempt, too.
        rewritten = {(key, self._offsets(unit)) for unit in units for key in unit.storage.twins}
        written = [chunk for chunk in written if _place_of(chunk) not in rewritten]

        total_bytes = sum(self._num_bytes(unit) for unit in self.units)
        remaining_bytes = sum(self._num_bytes(unit) for unit in units)
        job.need_space(remaining_bytes)
        writer = TorchDistWriter(folder, num_workers)
        try:
            done_bytes = total_bytes - remaining_bytes
            bar = progress("hf-to-megatron", total_bytes, done=done_bytes, in_bytes=True)
            with bar as advance, flush_behind(writer.descriptors):

                def convert(unit: Unit) -> None:
                    self._convert(unit, writer, job, written, advance)

                run_parallel(units, convert, num_workers)
            writer.finish(written, self._extra_states(), ITERATION)
        finally:
            writer.close()

    def _convert(
        self, unit: Unit, writer: TorchDistWriter, job: Job, written: list[WrittenChunk], advance: Advance
    ) -> None:
        shape = (*unit.storage.stack, self._padded_rows(unit, unit.tensor_rows), *unit.shape[1:])
        stacked_axes = tuple(1 for _ in unit.storage.index)
        sizes = (*stacked_axes, self._padded_rows(unit, unit.shape[0]), *unit.shape[1:])
        # The unit's own key comes last: if the journal has it, it has all.
        for key in (*unit.storage.twins, unit.storage.key):
            chunk = writer.write(
                key, shape, self._dtype(unit), self._offsets(unit), sizes, self._pieces(unit)
            )
            job.record(asdict(chunk))
            written.append(chunk)
        advance(amount=self._num_bytes(unit))

    def _pieces(self, unit: Unit) -> Iterator[bytes | memoryview]:
        """Yield a unit's bytes as its Megatron tensor has them. Each piece is valid until the next one."""
        buffer = Buffer()
        dtype = self._dtype(unit)
        if not unit.op.moves_rows:
            whole = unit.op.join([self.weights.read(name) for name in unit.hf], self.family.dims)
            yield byte_view(cast_tensor(whole, dtype, unit.hf[0]).contiguous())
            return
        for rows in unit.pieces(self.family.dims, PIECE_BYTES // dtype.itemsize):
            name = unit.hf[rows.part]
            data = self.weights.read_rows(name, rows.first, rows.count, buffer)
            yield cast(data, self.weights.tensors[name].dtype, dtype, name)
        zero_row = bytes(math.prod(unit.shape[1:]) * dtype.itemsize)
        num_padding_rows = self._padded_rows(unit, unit.shape[0]) - unit.shape[0]
        for _ in range(num_padding_rows):
            yield zero_row

    def _dtype(self, unit: Unit) -> Dtype:
        return self.dtypes[unit.storage.key]

    def _padded_rows(self, unit: Unit, num_rows: int) -> int:
        if unit.padded and self.padded_vocab_size is not None:
            return self.padded_vocab_size
        return num_rows

    def _place(self, unit: Unit) -> Place:
        return unit.storage.key, self._offsets(unit)

    def _offsets(self, unit: Unit) -> tuple[int, ...]:
        columns = tuple(0 for _ in unit.shape[1:])
        return (*unit.storage.index, unit.row, *columns)

    def _num_bytes(self, unit: Unit) -> int:
        num_rows = self._padded_rows(unit, unit.shape[0])
        return num_rows * math.prod(unit.shape[1:]) * self._dtype(unit).itemsize

    def _extra_states(self) -> list[str]:
        """List the keys under which Transformer Engine's layers look for FP8 scales. They accept None there.

        Norms are such layers, too, unless they are fused into the linear layer that follows. By default
        megatron-core refuses a checkpoint without one of these keys, and ignores keys that it does not need.
        """
        # A dictionary, because a set would not keep the order.
        keys: dict[str, None] = {}
        for unit in self.units:
            match = _IN_TRANSFORMER_ENGINE.fullmatch(unit.storage.key)
            if match is None:
                continue
            layer = match[1]
            # Attention itself is a layer with an extra state and without weights of its own.
            core_attention = re.sub(r"\.linear_proj$", ".core_attention", layer)
            index = ".".join(map(str, unit.storage.index or (0,)))
            lengths = ".".join(map(str, unit.storage.stack or (1,)))
            for name in (layer, core_attention):
                keys[f"{name}._extra_state/shard_{index}_{lengths}"] = None
        return list(keys)


def _place_of(chunk: WrittenChunk) -> Place:
    return chunk.key, chunk.chunk.offsets


def _dtypes_by_key(units: list[Unit], weights: SafetensorsFolder, dtype: Dtype | None) -> Mapping[str, Dtype]:
    """Choose the dtype of each key of the checkpoint.

    Megatron stacks several layers or experts under one key, so all of them must have the same dtype.
    """
    dtypes: dict[str, Dtype] = {}
    for unit in units:
        key = unit.storage.key
        for name in unit.hf:
            stored = weights.tensors[name].dtype
            if stored not in WEIGHT_DTYPES:
                raise UserError(
                    f"{name} is stored as {stored}; dequantise the model to bf16 and convert that"
                )
            key_dtype = stored if unit.keeps_dtype or dtype is None else dtype
            if dtypes.setdefault(key, key_dtype) != key_dtype:
                raise UserError(
                    f"{name} is {stored}, other layers are {dtypes[key]}; choose one with --dtype"
                )
    for key in {unit.storage.key for unit in units if unit.op.computes}:
        dtypes[key] = widened(dtypes[key])
    return dtypes
