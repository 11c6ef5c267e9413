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
from nemo_grpo.models.family import Unit
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.progress import Advance, progress

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ITERATION = 0
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

    Args:    dtype: of the result (bf16, fp16, fp32); None keeps the source's.
             padded_vocab_size: rows of the embeddings; None: the vocabulary as it is (megatron-core pads when
             it loads).
             resume: finish an interrupted call.  force: replace an existing output.
             sha256: also write ``SHA256SUMS``.
    Returns: ``output``, which holds ``iter_0000000`` and the files by which Megatron-Bridge finds it.
    """
    hf_model = Path(hf_model)
    output = Path(output)
    with open_model(hf_model) as (family, weights):
        wanted = dtype_for(dtype)
        conversion = _Conversion(family, weights, wanted, padded_vocab_size)
        settings = {
            "direction": "hf-to-megatron",
            "dtype": str(wanted),
            "padded_vocab_size": padded_vocab_size,
        }
        with Job(output, hf_model, settings, resume, force) as job:
            conversion.run(job, num_workers)
            stored = [(unit.key, conversion.dtypes[unit.key], unit.shape) for unit in conversion.units]
            write_bridge_files(job.data, family, main_dtype(stored), ITERATION)
            job.finish(sha256)
    log.info("%s is a Megatron checkpoint of %s", output, hf_model)
    return output


class _Conversion:
    """One conversion, checked before it starts."""

    def __init__(
        self, family: Family, weights: SafetensorsFolder, dtype: Dtype | None, padded_vocab_size: int | None
    ) -> None:
        self.family, self.weights = family, weights
        self.units = list(family.units())
        self.dtypes = _dtypes(self.units, weights, dtype)
        self.padded_vocab_size = padded_vocab_size
        if padded_vocab_size is not None and padded_vocab_size < family.dims["v"]:
            raise UserError(
                f"--padded-vocab-size {padded_vocab_size} is below vocab_size={family.dims['v']}; raise it"
            )

    def run(self, job: Job, num_workers: int) -> None:
        folder = job.data / f"iter_{ITERATION:07d}"
        folder.mkdir(exist_ok=True)
        written = [WrittenChunk.from_json(entry) for entry in job.journal]
        written = [one for one in written if chunk_is_whole(folder, one)]
        finished = _places(written)
        todo = [unit for unit in self.units if (unit.key, self._offsets(unit)) not in finished]
        again = {(key, self._offsets(unit)) for unit in todo for key in unit.twins}
        written = [one for one in written if not _places([one]) & again]
        total = sum(self._num_bytes(unit) for unit in self.units)
        left = sum(self._num_bytes(unit) for unit in todo)
        job.need_space(left)
        writer = TorchDistWriter(folder, num_workers)
        try:
            shown = progress("hf-to-megatron", total, done=total - left, in_bytes=True)
            with shown as advance, flush_behind(writer.descriptors):
                run_parallel(
                    todo, lambda unit: self._convert(unit, writer, job, written, advance), num_workers
                )
            writer.finish(written, self._extra_states(), ITERATION)
        finally:
            writer.close()

    def _convert(
        self, unit: Unit, writer: TorchDistWriter, job: Job, written: list[WrittenChunk], advance: Advance
    ) -> None:
        shape, dtype = self._key_shape(unit), self.dtypes[unit.key]
        sizes = (*(1 for _ in unit.index), self._num_rows(unit), *unit.shape[1:])
        for key in (*unit.twins, unit.key):  # the unit's own key comes last: if it is there, all are
            one = writer.write(key, shape, dtype, self._offsets(unit), sizes, self._pieces(unit))
            job.record(asdict(one))
            written.append(one)
        advance(amount=self._num_bytes(unit))

    def _pieces(self, unit: Unit) -> Iterator[bytes | memoryview]:
        """Yield a unit's bytes in its Megatron tensor; each piece is valid until the next."""
        buffer, wanted = Buffer(), self.dtypes[unit.key]
        if not unit.op.moves_rows:
            whole = unit.op.join([self.weights.read(name) for name in unit.hf], self.family.dims)
            yield byte_view(cast_tensor(whole, wanted, unit.hf[0]).contiguous())
            return
        for rows in unit.pieces(self.family.dims, PIECE_BYTES // wanted.itemsize):
            name = unit.hf[rows.part]
            data = self.weights.read_rows(name, rows.first, rows.count, buffer)
            yield cast(data, self.weights.tensors[name].dtype, wanted, name)
        no_token = bytes(math.prod(unit.shape[1:]) * wanted.itemsize)
        for _ in range(self._num_rows(unit) - unit.shape[0]):
            yield no_token

    def _num_rows(self, unit: Unit) -> int:
        return self.padded_vocab_size if unit.padded and self.padded_vocab_size else unit.shape[0]

    def _key_shape(self, unit: Unit) -> tuple[int, ...]:
        rows = self.padded_vocab_size if unit.padded and self.padded_vocab_size else unit.rows
        return (*unit.stack, rows, *unit.shape[1:])

    def _offsets(self, unit: Unit) -> tuple[int, ...]:
        return (*unit.index, unit.row, *(0 for _ in unit.shape[1:]))

    def _num_bytes(self, unit: Unit) -> int:
        return self._num_rows(unit) * math.prod(unit.shape[1:]) * self.dtypes[unit.key].itemsize

    def _extra_states(self) -> list[str]:
        """List keys under which Transformer Engine's layers look for FP8 scales; they accept None.

        Norms are such layers too, unless fused into the linear layer after them. megatron-core by default
        refuses a checkpoint that lacks a key, and ignores others.
        """
        found: dict[str, None] = {}
        for unit in self.units:
            if match := _IN_TRANSFORMER_ENGINE.fullmatch(unit.key):
                layer = match[1]
                attention = re.sub(r"\.linear_proj$", ".core_attention", layer)
                at, of = (".".join(map(str, numbers)) for numbers in (unit.index or (0,), unit.stack or (1,)))
                found |= {f"{name}._extra_state/shard_{at}_{of}": None for name in (layer, attention)}
        return list(found)


def _places(written: list[WrittenChunk]) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.key, one.chunk.offsets) for one in written}


def _dtypes(units: list[Unit], weights: SafetensorsFolder, dtype: Dtype | None) -> Mapping[str, Dtype]:
    """Choose the dtype of each key: one for all its layers, since Megatron stacks them."""
    key_dtypes: dict[str, Dtype] = {}
    for unit in units:
        for name in unit.hf:
            stored = weights.tensors[name].dtype
            if stored not in WEIGHT_DTYPES:
                raise UserError(
                    f"{name} is stored as {stored}; dequantise the model to bf16 and convert that"
                )
            chosen = stored if unit.keeps_dtype else dtype or stored
            if key_dtypes.setdefault(unit.key, chosen) != chosen:
                raise UserError(
                    f"{name} is {stored}, other layers are {key_dtypes[unit.key]}; choose one with --dtype"
                )
    computed = {unit.key for unit in units if unit.op.computes}
    return {key: widened(kind) if key in computed else kind for key, kind in key_dtypes.items()}
