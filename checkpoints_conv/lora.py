"""LoRA adapters that NeMo-RL and Megatron-Bridge train: merged into the model, or as a PEFT adapter.

Megatron adapts a fused layer with one pair A [r, in], B [out, r]: y = W x + (alpha / r) B A x. Rows of B are
divided like rows of W, so queries, keys and values share A and have a B each; likewise gate and up.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_conv.formats.dtypes import byte_view, cast_tensor, dtype_for, main_dtype, num_bytes_of
from checkpoints_conv.formats.model_folder import ADAPTER_CONFIG, hf_config
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.safetensors_writer import Planned
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_model import open_model
from checkpoints_conv.job import Job, fingerprint, run_parallel
from checkpoints_conv.locate import ADAPTER, Place, locate_beside_adapters
from checkpoints_conv.megatron_to_hf import MAX_SHARD_BYTES, copy_with_config, shards
from checkpoints_conv.model_card import training_of, write_card
from checkpoints_conv.run_config import RUN_CONFIG, check_run_config, read_section
from checkpoints_conv.verify import gaps_of
from nemo_grpo.errors import MOST_NAMES, UserError
from nemo_grpo.families import Family, family_for
from nemo_grpo.families.family import Unit
from nemo_grpo.progress import progress


@dataclass(frozen=True)
class Adapter:
    """The low-rank update of one unit. Attributes: unit; rank; layer: its key without the last part."""

    unit: Unit
    rank: int
    layer: str

    def read(self, reader: TorchDistReader, family: Family) -> tuple[Tensor, list[Tensor]]:
        """A [r, in], and B [out, r] of every Hugging Face tensor of the unit."""
        index, ones = self.unit.index, tuple(1 for _ in self.unit.index)
        columns, rows = self.unit.shape[1], self.unit.shape[0]
        a = reader.read(f"{self.layer}linear_in.weight", (*index, 0, 0), (*ones, self.rank, columns))
        b = reader.read(
            f"{self.layer}linear_out.weight", (*index, self.unit.row, 0), (*ones, rows, self.rank)
        )
        heights = [shape[0] for shape in self.unit.hf_shapes]
        parts = self.unit.op.split(b.reshape(rows, self.rank), heights, family.dims)
        return a.reshape(self.rank, columns), parts


def merge_lora(
    megatron_checkpoint: Path,
    base: Path,
    output: Path,
    *,
    hf_config_folder: Path | None = None,
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
    Raises:  UserError: there are no adapters, they do not fit the base, or the output may not be written.
    """
    wanted, config_folder = dtype_for(dtype), hf_config_folder or base
    with _open(megatron_checkpoint, base, config_folder, num_workers) as (family, weights, reader, adapters):
        scale, units = _alpha(reader, alpha), list(family.units())
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
            a, parts = adapter.read(reader, family)
            for name, weight, b in zip(unit.hf, bases, parts, strict=True):
                yield name, torch.addmm(weight.float(), b.float(), a.float(), alpha=scale / adapter.rank)

        settings = {"direction": "lora-merge", "alpha": scale, "dtype": str(wanted)}
        settings |= {"base": fingerprint(base), "config": hf_config(config_folder)}
        settings |= {"max_shard_bytes": max_shard_bytes}
        with Job(output, megatron_checkpoint, settings, resume, force, [base, config_folder]) as job:
            copy_with_config(config_folder, job.data, main_dtype(planned))
            _write(job, planned, units, convert, "model", max_shard_bytes, num_workers)
            write_card(job.data, training_of(reader.folder), base)
            job.finish(sha256)
    return output


def export_adapter(
    megatron_checkpoint: Path,
    base: Path,
    output: Path,
    *,
    hf_config_folder: Path | None = None,
    alpha: float | None = None,
    dtype: str | torch.dtype | None = None,
    num_workers: int = 2,
    resume: bool = False,
    force: bool = False,
    sha256: bool = False,
) -> Path:
    """Write the adapters as a PEFT folder, which PEFT and vLLM load on top of the base.

    Args:    hf_config_folder: its config.json is what run_config.yaml must agree with; None: the base's.
             The others are as in `merge_lora`.
    Returns: ``output``: adapter_config.json and adapter_model.safetensors.
    Raises:  UserError: there are no adapters, they do not fit the base, or the output may not be written.
    """
    wanted, config_folder = dtype_for(dtype), hf_config_folder or base
    opened = _open(megatron_checkpoint, base, config_folder, num_workers, by_peft=True)
    with opened as (family, _weights, reader, adapters):
        scale = _alpha(reader, alpha)
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

        settings = {"direction": "lora-adapter", "alpha": scale, "dtype": str(wanted)}
        settings |= {"base": fingerprint(base)}
        with Job(output, megatron_checkpoint, settings, resume, force, [base, config_folder]) as job:
            total = sum(num_bytes_of(kind, shape) for _, kind, shape in planned)
            _write(job, planned, list(adapters), convert, "adapter_model", total, num_workers)
            names = {name for unit in adapters for name in unit.hf}
            modules = {re.sub(r"\.weight$", "", name).rpartition(".")[2] for name in names}
            config = peft_config(base, ranks.pop(), scale, modules)
            (job.data / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            write_card(job.data, training_of(reader.folder), base, is_adapter=True)
            job.finish(sha256)
    return output


@contextmanager
def _open(
    megatron_checkpoint: Path, base: Path, config_folder: Path, num_workers: int, *, by_peft: bool = False
) -> Iterator[tuple[Family, SafetensorsFolder, TorchDistReader, dict[Unit, Adapter]]]:
    """Within the block, the base's family and weights, the checkpoint, and its adapters.

    Args:   by_peft: the adapters will be applied by PEFT.
    Raises: UserError: as `merge_lora`.
    """
    with open_model(base) as (family, weights), closing(TorchDistReader(megatron_checkpoint)) as reader:
        if by_peft and family.prefix:
            raise UserError(
                f"--lora adapter: {family.config['architectures'][0]} has no PEFT names; use --lora merge"
            )
        described = family_for(hf_config(config_folder))
        _check_fits(described, config_folder, family, base)
        check_run_config(described, reader.folder / RUN_CONFIG)
        adapters = find_adapters(family, reader)
        if by_peft:
            _check_peft_applies(family, adapters)
        _check_nothing_is_lost(family, weights, reader, num_workers)
        yield family, weights, reader, adapters


def _check_fits(described: Family, folder: Path, family: Family, base: Path) -> None:
    """Compare a config.json with the base's; the training may have overridden what shapes do not tell.

    Raises: UserError: it is of another architecture or of other sizes.
    """
    (found, wanted) = (
        {
            "model_type": one.spec.model_type,
            "num_attention_heads": one.spec.num_attention_heads,
            "num_key_value_heads": one.spec.num_key_value_heads,
            **one.hf_shapes,
        }
        for one in (described, family)
    )
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"--hf-config {folder} is of another model than --base {base}: {name} is {found.get(name)}, "
                f"not {wanted.get(name)}; give the adapted model's, or leave --hf-config out"
            )


def _check_peft_applies(family: Family, adapters: Iterable[Unit]) -> None:
    """Refuse adapters that PEFT 0.21 drops in models with experts.

    It takes every ``gate_proj``, ``up_proj`` and ``down_proj`` for the routed experts', also those of dense
    layers and shared experts, and adapts no router but Qwen3-MoE's.

    Raises: UserError: there are such adapters.
    """
    names = [name for unit in adapters for name in unit.hf if ".mlp." in name]
    if names and family.spec.num_experts and family.spec.model_type != "qwen3_moe":
        raise UserError(
            f"--lora adapter: PEFT does not apply adapters below mlp. to {family.spec.model_type}, which has "
            f"experts ({names[0]}); use --lora merge"
        )


def _check_nothing_is_lost(
    family: Family, weights: SafetensorsFolder, reader: TorchDistReader, num_workers: int
) -> None:
    """A checkpoint may hold the frozen base beside the adapters, and nothing else.

    Raises: UserError: a tensor is neither an adapter nor, in its dtype, the base's.
    """
    places, lost = locate_beside_adapters(family, reader)

    def compare(place: Place) -> None:
        if gaps_of(place, family, weights, reader):
            lost.add(place.name)
        advance()

    if places and not lost:
        with progress("compare with --base", len(places)) as advance:
            run_parallel(places, compare, num_workers)
    if lost:
        named = ", ".join(sorted(lost)[:MOST_NAMES])
        named += f", ... ({len(lost)} in all)" if len(lost) > MOST_NAMES else ""
        raise UserError(
            f"{reader.folder} holds what is neither an adapter nor equal to --base {weights.folder}, and "
            f"--lora would lose it: {named}; give the base that was adapted, or export the checkpoint with "
            "Megatron-Bridge"
        )


def find_adapters(family: Family, reader: TorchDistReader) -> dict[Unit, Adapter]:
    """Every adapted unit of a checkpoint, with its adapter.

    Raises: UserError: there is none, or one is on a layer or of a kind that is not supported.
    """
    stored = {name: key.shape for name, key in reader.weights.items() if ADAPTER in name}
    found: dict[Unit, Adapter] = {}
    known: set[str] = set()
    for unit in family.units():
        layer = unit.key.removesuffix("weight") + ADAPTER.removeprefix(".")
        names = (f"{layer}linear_in.weight", f"{layer}linear_out.weight")
        if not (unit.op.moves_rows and stored.keys() >= set(names)):
            continue
        known.update(names)
        rank = stored[names[0]][len(unit.stack)]
        shapes = ((*unit.stack, rank, unit.shape[1]), (*unit.stack, unit.rows, rank))
        if tuple(stored[name] for name in names) != shapes:
            raise UserError(f"{layer}* is {[stored[name] for name in names]}, the base says {list(shapes)}")
        found[unit] = Adapter(unit, rank, layer)
    if unknown := sorted(set(stored) - known):
        raise UserError(f"adapters of a kind that is not supported: {', '.join(unknown)}")
    if not found:
        raise UserError(f"{reader.folder} has no LoRA adapters; convert it without --lora")
    return found


def _alpha(reader: TorchDistReader, given: float | None) -> float:
    path, name, alpha = reader.folder / RUN_CONFIG, "--lora-alpha", given
    if given is None:
        name, alpha = f"{path}: peft.alpha", read_section(path, "peft").get("alpha")
    if alpha is None:
        raise UserError(f"{path} does not say peft.alpha; give it with --lora-alpha")
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:  # nor is NaN
        raise UserError(f"{name} is {alpha!r:.60}, no finite number; give the training's with --lora-alpha")
    return float(alpha)


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


def peft_config(base: Path, rank: int, alpha: float, modules: set[str]) -> dict[str, object]:
    """The content of adapter_config.json.

    Args: base: the model that the adapters belong to.  modules: last parts of the adapted modules' names.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
