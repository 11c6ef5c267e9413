"""A Megatron torch_dist checkpoint to a Hugging Face folder, a megabyte in memory per worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_conv.formats.dtypes import (
    Dtype,
    byte_view,
    cast,
    cast_tensor,
    dtype_for,
    main_dtype,
    narrowed,
    num_bytes_of,
    tensor_of,
)
from checkpoints_conv.formats.pieces import PIECE_BYTES
from checkpoints_conv.formats.safetensors_writer import Planned, SafetensorsWriter, TensorWriter
from checkpoints_conv.formats.torch_dist import Block, TorchDistReader
from checkpoints_conv.job import Job, flush_behind, run_parallel
from checkpoints_conv.locate import Place, locate
from nemo_grpo.models import family_for
from nemo_grpo.models.units import Unit
from nemo_grpo.support.model_card import training_of, write_card
from nemo_grpo.support.model_folder import WEIGHTS_KEY, auto_map_files, copy_side_files, hf_config
from nemo_grpo.support.progress import Advance, progress

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of the largest safetensors file."""


def megatron_to_hf(
    megatron_checkpoint: str | Path,
    hf_config_folder: str | Path,
    output: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_workers: int = 2,
    resume: bool = False,
    force: bool = False,
    sha256: bool = False,
) -> Path:
    """Convert a checkpoint of any parallel layout. Optimizer state is not read.

    Args:
        megatron_checkpoint: torch_dist folder, its parent, or NeMo-RL's ``step_N``.
        hf_config_folder: folder from which config.json, tokenizer and chat template of the result come.
        output: folder to create.
        dtype: dtype of the result (bf16, fp16, fp32); None keeps the checkpoint's.
        max_shard_bytes: size of the largest safetensors file.
        num_workers: threads.
        resume: finish an interrupted call.
        force: replace an existing output.
        sha256: also write ``SHA256SUMS``.

    Returns: ``output``, which `AutoModelForCausalLM.from_pretrained` loads.
    """
    megatron_checkpoint = Path(megatron_checkpoint)
    hf_config_folder = Path(hf_config_folder)
    output = Path(output)
    config = hf_config(hf_config_folder)
    family = family_for(config)
    with closing(TorchDistReader(megatron_checkpoint)) as reader:
        places = locate(family, reader)
        result_dtype = dtype_for(dtype)
        settings = {
            "direction": "megatron-to-hf",
            "dtype": str(result_dtype),
            "max_shard_bytes": max_shard_bytes,
            "config": config,
        }
        with Job(output, megatron_checkpoint, settings, resume, force, [hf_config_folder]) as job:
            tensors = list(_tensors(places, reader, result_dtype))
            copy_with_config(hf_config_folder, job.data, main_dtype(tensors))
            with shards(job, tensors, max_shard_bytes) as (writer, finished):
                unfinished = [place for place in places if not finished.issuperset(place.unit.hf)]
                _convert_all(unfinished, reader, writer, job, family.dims, num_workers)
            write_card(job.data, training_of(reader.folder), hf_config_folder)
            job.finish(sha256)
    log.info("%s is a Hugging Face model", output)
    return output


def _tensors(places: list[Place], reader: TorchDistReader, dtype: Dtype | None) -> Iterator[Planned]:
    """Yield name, dtype and shape of each tensor of the result."""
    main = main_dtype((place.name, reader.keys[place.name].dtype, place.unit.shape) for place in places)
    for place in places:
        tensor_dtype = reader.keys[place.name].dtype
        if place.unit.op.computes:
            # Megatron's tensor is wider than the model, so that computing lost no bits on the way in.
            tensor_dtype = narrowed(tensor_dtype, main)
        if dtype is not None and not place.unit.keeps_dtype:
            tensor_dtype = dtype
        for name, shape in zip(place.unit.hf, place.unit.hf_shapes, strict=True):
            yield name, tensor_dtype, shape


@contextmanager
def shards(
    job: Job, planned: list[Planned], max_shard_bytes: int, name: str = "model"
) -> Iterator[tuple[SafetensorsWriter, set[str]]]:
    """Open the safetensors files of a result, and write their index at the end.

    Yields: the files' writer, and the names of the tensors that an interrupted attempt finished.
    """
    job.need_space(sum(num_bytes_of(dtype, shape) for _, dtype, shape in planned), reuses=True)
    writer = SafetensorsWriter(job.data, planned, max_shard_bytes, name)
    try:
        # A crash can lose data that the journal lists, so the checksums are compared.
        finished = {entry["name"] for entry in job.journal if writer.holds(entry["name"], entry["crc32"])}
        yield writer, finished
        writer.write_index()
    finally:
        writer.close()


def _convert_all(
    places: list[Place],
    reader: TorchDistReader,
    writer: SafetensorsWriter,
    job: Job,
    dims: dict[str, int],
    num_workers: int,
) -> None:
    """Convert the units at these places of the checkpoint, on several threads."""

    def convert(place: Place, advance: Advance) -> None:
        parts = [writer.open(name) for name in place.unit.hf]
        with place.open(reader) as block:
            _write_parts(place.unit, block, parts, dims)
        for part in parts:
            assert part.is_full, part.name
            job.record({"name": part.name, "crc32": part.crc32})
            advance(amount=part.stored.num_bytes)

    remaining_bytes = sum(writer.tensors[name].num_bytes for place in places for name in place.unit.hf)
    done_bytes = writer.num_bytes - remaining_bytes
    bar = progress("megatron-to-hf", writer.num_bytes, done=done_bytes, in_bytes=True)
    with bar as advance, flush_behind(list(writer.descriptors.values())):
        run_parallel(places, lambda place: convert(place, advance), num_workers)


def _write_parts(unit: Unit, block: Block, parts: Sequence[TensorWriter], dims: dict[str, int]) -> None:
    """Write the Hugging Face tensors of a unit, in the dtypes that were planned for them."""
    if unit.op.keeps_order:
        for rows in unit.pieces(dims, PIECE_BYTES // block.dtype.itemsize):
            part = parts[rows.part]
            part.write(cast(block.read(rows.count), block.dtype, part.stored.dtype, part.name))
        return
    whole = tensor_of(block.read(unit.tensor_rows), block.dtype, unit.shape)
    tensors = unit.op.split(whole, [shape[0] for shape in unit.hf_shapes], dims)
    for part, tensor in zip(parts, tensors, strict=True):
        part.write(byte_view(cast_tensor(tensor, part.stored.dtype, part.name)))


def copy_with_config(source: Path, target: Path, dtype: Dtype) -> None:
    """Copy config, generation config, tokenizer and chat templates, and adapt the config to the result."""
    names = copy_side_files(source, target)
    config = hf_config(source)
    # The source may be quantised, to FP8 for example. The result is not.
    config.pop("quantization_config", None)
    # This key names the source's weight files, which the result does not have.
    config.pop(WEIGHTS_KEY, None)
    if not auto_map_files(config) <= names:
        # transformers has every family that is converted, and would look for code that is not there.
        config.pop("auto_map")
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if key in config:
            # Heads for multi-token prediction are not converted.
            config[key] = 0
    dtype_keys = [key for key in ("torch_dtype", "dtype") if key in config]
    for key in dtype_keys or ["dtype"]:
        config[key] = dtype.name
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}:
        log.warning(
            "%s has no tokenizer, so the result has none either; copy one there before serving", source
        )
