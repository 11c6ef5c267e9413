"""LoRA adapters that NeMo-RL and Megatron-Bridge train: merged into the model, or as a PEFT adapter.

Megatron adapts a fused layer with one pair A [r, in], B [out, r]: y = W x + (alpha / r) B A x. Rows of B are
divided like rows of W, so queries, keys and values share A and have a B each; likewise gate and up.

`_export` writes either form of the result and resumes an interrupted attempt. A sink tells it which tensors
and which further files to write.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints_conv.adapters import Adapted, open_adapted
from checkpoints_conv.formats.dtypes import Dtype, byte_view, cast_tensor, dtype_for, main_dtype, num_bytes_of
from checkpoints_conv.formats.safetensors_writer import Planned
from checkpoints_conv.job import Job, fingerprint, run_parallel
from checkpoints_conv.megatron_to_hf import MAX_SHARD_BYTES, copy_with_config, shards
from nemo_grpo.models.units import Unit
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_card import base_model, training_of, write_card
from nemo_grpo.support.model_folder import ADAPTER_CONFIG, hf_config, peft_config
from nemo_grpo.support.progress import progress


class _Sink(Protocol):
    """One form of the result: a merged model, or a PEFT adapter.

    Attributes:
        units: units that are written.
        planned: names, dtypes and shapes of the result's tensors.
        file_name: beginning of the names of its safetensors files.
        max_shard_bytes: size of the largest safetensors file.
        settings: settings that change the result, besides the adapters and the base.
    """

    units: list[Unit]
    planned: list[Planned]
    file_name: str
    max_shard_bytes: int
    settings: dict[str, Any]

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of a unit, before the tensor is converted to its planned dtype."""

    def write_side_files(self, folder: Path) -> None:
        """Write all files of the result except the weights."""


class _MergedModel:
    """A Hugging Face folder with W + scale B A in place of W."""

    file_name = "model"

    def __init__(
        self, adapted: Adapted, config_folder: Path, dtype: Dtype | None, max_shard_bytes: int
    ) -> None:
        self.adapted = adapted
        self.config_folder = config_folder
        self.max_shard_bytes = max_shard_bytes
        self.units = list(adapted.family.units())
        keep_dtype = {name for unit in self.units if unit.keeps_dtype for name in unit.hf}
        self.planned: list[Planned] = []
        for name, shape in adapted.family.hf_shapes.items():
            tensor_dtype = adapted.weights.tensors[name].dtype
            if dtype is not None and name not in keep_dtype:
                tensor_dtype = dtype
            self.planned.append((name, tensor_dtype, shape))
        config = hf_config(config_folder)
        self.settings = {"direction": "lora-merge", "config": config, "max_shard_bytes": max_shard_bytes}

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        bases = [self.adapted.weights.read(name) for name in unit.hf]
        adapter = self.adapted.adapters.get(unit)
        if adapter is None:
            yield from zip(unit.hf, bases, strict=True)
            return
        scale = self.adapted.scale(adapter)
        a, b_of_parts = adapter.read(self.adapted.reader, self.adapted.family)
        for name, weight, b in zip(unit.hf, bases, b_of_parts, strict=True):
            # In float32, so that product and sum are rounded only once, when the result is written.
            yield name, torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)

    def write_side_files(self, folder: Path) -> None:
        copy_with_config(self.config_folder, folder, main_dtype(self.planned))
        write_card(folder, training_of(self.adapted.reader.folder), self.adapted.weights.folder)


class _PeftAdapter:
    """A PEFT folder: A and B of every Hugging Face tensor, in one file."""

    file_name = "adapter_model"

    def __init__(self, adapted: Adapted, dtype: Dtype | None) -> None:
        self.adapted = adapted
        self.units = list(adapted.adapters)
        ranks = {adapter.rank for adapter in adapted.adapters.values()}
        if len(ranks) > 1:
            raise UserError(f"the adapters have ranks {sorted(ranks)}; PEFT needs one, use --lora merge")
        self.rank = ranks.pop()
        self.planned: list[Planned] = []
        for unit, adapter in adapted.adapters.items():
            adapter_dtype = adapted.reader.keys[f"{adapter.layer}linear_in.weight"].dtype
            if dtype is not None:
                adapter_dtype = dtype
            for name, shape in zip(unit.hf, unit.hf_shapes, strict=True):
                self.planned.append((_peft_name(name, "A"), adapter_dtype, (adapter.rank, shape[1])))
                self.planned.append((_peft_name(name, "B"), adapter_dtype, (shape[0], adapter.rank)))
        # PEFT reads one file and no index, so all tensors go into one shard.
        self.max_shard_bytes = sum(num_bytes_of(kind, shape) for _, kind, shape in self.planned)
        self.settings: dict[str, Any] = {"direction": "lora-adapter"}

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        a, b_of_parts = self.adapted.adapters[unit].read(self.adapted.reader, self.adapted.family)
        for name, b in zip(unit.hf, b_of_parts, strict=True):
            # Megatron's A serves all parts of a fused layer; PEFT adapts each part by itself.
            yield _peft_name(name, "A"), a
            yield _peft_name(name, "B"), b

    def write_side_files(self, folder: Path) -> None:
        base = self.adapted.weights.folder
        names = {name for unit in self.units for name in unit.hf}
        modules = {re.sub(r"\.weight$", "", name).rpartition(".")[2] for name in names}
        training = training_of(self.adapted.reader.folder)
        # PEFT scales by lora_alpha / r. Rank-stabilized adapters scale by alpha / sqrt(r).
        alpha = self.adapted.alpha
        if self.adapted.is_rank_stabilized:
            alpha *= math.sqrt(self.rank)
        base_name = base_model(training, base)[0]
        config = peft_config(base_name, self.rank, alpha, modules)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_card(folder, training, base, is_adapter=True)


def merge_lora(
    megatron_checkpoint: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    hf_config_folder: str | Path | None = None,
    alpha: float | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_workers: int = 2,
    resume: bool = False,
    force: bool = False,
    sha256: bool = False,
) -> Path:
    """Add the adapters to a base model: W + (alpha / r) B A, computed in float32 and rounded once.

    Args:
        megatron_checkpoint: checkpoint that holds the adapters.
        base: Hugging Face folder of the model that was adapted.
        output: folder to create.
        hf_config_folder: folder with config.json, tokenizer and chat templates of the result; None: the base.
        alpha: alpha of the adapters; None: from the checkpoint's run_config.yaml.
        dtype: dtype of the result; None: the base's.
        max_shard_bytes: as in `megatron_to_hf`, like the further arguments.

    Returns: ``output``, a Hugging Face folder without adapters.
    """
    checkpoint = Path(megatron_checkpoint)
    base = Path(base)
    result_dtype = dtype_for(dtype)
    config_folder = Path(hf_config_folder or base)
    with open_adapted(checkpoint, base, config_folder, alpha, num_workers) as adapted:
        sink = _MergedModel(adapted, config_folder, result_dtype, max_shard_bytes)
        with _job(checkpoint, adapted, sink, result_dtype, config_folder, Path(output), resume, force) as job:
            _export(job, sink, num_workers, sha256)
    return Path(output)


def export_adapter(
    megatron_checkpoint: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    hf_config_folder: str | Path | None = None,
    alpha: float | None = None,
    dtype: str | torch.dtype | None = None,
    num_workers: int = 2,
    resume: bool = False,
    force: bool = False,
    sha256: bool = False,
) -> Path:
    """Write the adapters as a PEFT folder, which PEFT and vLLM load on top of the base.

    Args:
        megatron_checkpoint: checkpoint that holds the adapters.
        base: Hugging Face folder of the model that was adapted.
        output: folder to create.
        hf_config_folder: folder whose config.json must agree with run_config.yaml; None: the base.
        alpha: as in `merge_lora`, like the further arguments.

    Returns: ``output``: adapter_config.json and adapter_model.safetensors.
    """
    checkpoint = Path(megatron_checkpoint)
    base = Path(base)
    result_dtype = dtype_for(dtype)
    config_folder = Path(hf_config_folder or base)
    with open_adapted(checkpoint, base, config_folder, alpha, num_workers, by_peft=True) as adapted:
        sink = _PeftAdapter(adapted, result_dtype)
        with _job(checkpoint, adapted, sink, result_dtype, config_folder, Path(output), resume, force) as job:
            _export(job, sink, num_workers, sha256)
    return Path(output)


def _job(
    checkpoint: Path,
    adapted: Adapted,
    sink: _Sink,
    dtype: Dtype | None,
    config_folder: Path,
    output: Path,
    resume: bool,
    force: bool,
) -> Job:
    """Make the `Job` of a sink; its settings also tell changes of alpha, dtype and base."""
    base = adapted.weights.folder
    settings = sink.settings | {"alpha": adapted.alpha, "dtype": str(dtype), "base": fingerprint(base)}
    return Job(output, checkpoint, settings, resume, force, [base, config_folder])


def _export(job: Job, sink: _Sink, num_workers: int, sha256: bool) -> None:
    """Write every tensor that an interrupted attempt did not finish, and the sink's other files."""

    def write(unit: Unit) -> None:
        for name, tensor in sink.tensors(unit):
            if name in finished:
                continue
            rounded = cast_tensor(tensor, writer.tensors[name].dtype, name)
            checksum = writer.write(name, byte_view(rounded.contiguous()))
            job.record({"name": name, "crc32": checksum})
            advance(amount=writer.tensors[name].num_bytes)

    with shards(job, sink.planned, sink.max_shard_bytes, sink.file_name) as (writer, finished):
        done_bytes = sum(writer.tensors[name].num_bytes for name in finished)
        with progress("lora", writer.num_bytes, done=done_bytes, in_bytes=True) as advance:
            run_parallel(sink.units, write, num_workers)
    sink.write_side_files(job.data)
    job.finish(sha256)


def _peft_name(hf_name: str, matrix: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{matrix}.weight"
