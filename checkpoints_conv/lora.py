"""LoRA adapters that NeMo-RL and Megatron-Bridge train: merged into the model, or as a PEFT adapter.

Megatron adapts a fused layer with one pair A [r, in], B [out, r]: y = W x + (alpha / r) B A x. Rows of B are
divided like rows of W, so queries, keys and values share A and have a B each; likewise gate and up.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_conv.adapters import open_adapted
from checkpoints_conv.formats.dtypes import byte_view, cast_tensor, dtype_for, main_dtype, num_bytes_of
from checkpoints_conv.formats.safetensors_writer import Planned
from checkpoints_conv.job import Job, fingerprint, run_parallel
from checkpoints_conv.megatron_to_hf import MAX_SHARD_BYTES, copy_with_config, shards
from nemo_grpo.models.family import Unit
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_card import base_model, training_of, write_card
from nemo_grpo.support.model_folder import ADAPTER_CONFIG, hf_config, peft_config
from nemo_grpo.support.progress import progress


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

    Args:    base: Hugging Face folder of the model that was adapted.
             hf_config_folder: config.json, tokenizer and chat templates of the result; None: the base's.
             alpha: of the adapters; None: from the checkpoint's run_config.yaml.
             The others are as in `megatron_to_hf`.
    Returns: ``output``, a Hugging Face folder without adapters.
    """
    megatron_checkpoint = Path(megatron_checkpoint)
    base = Path(base)
    output = Path(output)
    wanted = dtype_for(dtype)
    config_folder = Path(hf_config_folder or base)
    with open_adapted(megatron_checkpoint, base, config_folder, alpha, num_workers) as found:
        family, weights, reader, adapters = found.family, found.weights, found.reader, found.adapters
        units = list(family.units())
        rounded = {name for unit in units if not unit.keeps_dtype for name in unit.hf}
        planned = [
            (name, wanted if wanted and name in rounded else weights.tensors[name].dtype, shape)
            for name, shape in family.hf_shapes.items()
        ]

        def convert(unit: Unit) -> Iterator[tuple[str, Tensor]]:
            bases = [weights.read(name) for name in unit.hf]
            if unit not in adapters:
                yield from zip(unit.hf, bases, strict=True)
                return
            adapter = adapters[unit]
            scale = found.scale(adapter)
            a, parts = adapter.read(reader, family)
            for name, weight, b in zip(unit.hf, bases, parts, strict=True):
                yield name, torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)

        settings = {"direction": "lora-merge", "alpha": found.alpha, "dtype": str(wanted)}
        settings |= {"base": fingerprint(base), "config": hf_config(config_folder)}
        settings["max_shard_bytes"] = max_shard_bytes
        with Job(output, megatron_checkpoint, settings, resume, force, [base, config_folder]) as job:
            copy_with_config(config_folder, job.data, main_dtype(planned))
            _write(job, planned, units, convert, "model", max_shard_bytes, num_workers)
            write_card(job.data, training_of(reader.folder), base)
            job.finish(sha256)
    return output


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

    Args:    hf_config_folder: its config.json must agree with run_config.yaml; None: the base's.
             The others are as in `merge_lora`.
    Returns: ``output``: adapter_config.json and adapter_model.safetensors.
    """
    megatron_checkpoint = Path(megatron_checkpoint)
    base = Path(base)
    output = Path(output)
    wanted = dtype_for(dtype)
    config_folder = Path(hf_config_folder or base)
    opened = open_adapted(megatron_checkpoint, base, config_folder, alpha, num_workers, by_peft=True)
    with opened as found:
        family, reader, adapters = found.family, found.reader, found.adapters
        ranks = {adapter.rank for adapter in adapters.values()}
        if len(ranks) > 1:
            raise UserError(f"the adapters have ranks {sorted(ranks)}; PEFT needs one, use --lora merge")
        planned: list[Planned] = []
        for unit, adapter in adapters.items():
            stored = wanted or reader.keys[f"{adapter.layer}linear_in.weight"].dtype
            for name, shape in zip(unit.hf, unit.hf_shapes, strict=True):
                planned.append((_peft_name(name, "A"), stored, (adapter.rank, shape[1])))
                planned.append((_peft_name(name, "B"), stored, (shape[0], adapter.rank)))

        def convert(unit: Unit) -> Iterator[tuple[str, Tensor]]:
            a, parts = adapters[unit].read(reader, family)
            for name, b in zip(unit.hf, parts, strict=True):
                yield _peft_name(name, "A"), a
                yield _peft_name(name, "B"), b

        settings = {"direction": "lora-adapter", "alpha": found.alpha, "dtype": str(wanted)}
        settings["base"] = fingerprint(base)
        with Job(output, megatron_checkpoint, settings, resume, force, [base, config_folder]) as job:
            total = sum(num_bytes_of(kind, shape) for _, kind, shape in planned)
            _write(job, planned, list(adapters), convert, "adapter_model", total, num_workers)
            names = {name for unit in adapters for name in unit.hf}
            modules = {re.sub(r"\.weight$", "", name).rpartition(".")[2] for name in names}
            training = training_of(reader.folder)
            rank = ranks.pop()
            # PEFT scales by lora_alpha / r: of rank-stabilized adapters this is alpha times the root of r.
            alpha = found.alpha * math.sqrt(rank) if found.is_rank_stabilized else found.alpha
            config = peft_config(base_model(training, base)[0], rank, alpha, modules)
            (job.data / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            write_card(job.data, training, base, is_adapter=True)
            job.finish(sha256)
    return output


def _write(
    job: Job,
    planned: list[Planned],
    units: list[Unit],
    convert: Callable[[Unit], Iterator[tuple[str, Tensor]]],
    name: str,
    max_shard_bytes: int,
    num_workers: int,
) -> None:
    def work(unit: Unit) -> None:
        for tensor_name, tensor in convert(unit):
            if tensor_name not in finished:
                rounded = cast_tensor(tensor, writer.tensors[tensor_name].dtype, tensor_name)
                checksum = writer.write(tensor_name, byte_view(rounded.contiguous()))
                job.record({"name": tensor_name, "crc32": checksum})
                advance(amount=writer.tensors[tensor_name].num_bytes)

    with shards(job, planned, max_shard_bytes, name) as (writer, finished):
        done = sum(writer.tensors[tensor_name].num_bytes for tensor_name in finished)
        with progress("lora", writer.num_bytes, done=done, in_bytes=True) as advance:
            run_parallel(units, work, num_workers)


def _peft_name(hf_name: str, matrix: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{matrix}.weight"
