"""LoRA adapters of a checkpoint, checked against their base."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.job import run_parallel
from checkpoints_conv.locate import ADAPTER, Place, locate_beside_adapters, open_model
from checkpoints_conv.run_config import RUN_CONFIG, check_run_config, read_section
from checkpoints_conv.verify import gaps_of
from nemo_grpo.models import Family, family_for
from nemo_grpo.models.units import Unit
from nemo_grpo.support.errors import UserError, listed
from nemo_grpo.support.model_folder import hf_config
from nemo_grpo.support.progress import progress

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = ("LoRA", "VLMLoRA")
"""Megatron-Bridge's classes of adapters that are read; DoRA and CanonicalLoRA compute something else."""


@dataclass(frozen=True)
class Adapter:
    """The low-rank update of one unit.

    Attributes:
        unit: unit of the base model that the adapter updates.
        rank: number r of rows of A and columns of B.
        layer: prefix of the adapter's keys in the checkpoint.
    """

    unit: Unit
    rank: int
    layer: str

    def read(self, reader: TorchDistReader, family: Family) -> tuple[Tensor, list[Tensor]]:
        """Read A [r, in], and B [out, r] of every Hugging Face tensor of the unit."""
        index = self.unit.storage.index
        stacked_axes = tuple(1 for _ in index)
        rows, columns = self.unit.shape
        a_sizes = (*stacked_axes, self.rank, columns)
        b_sizes = (*stacked_axes, rows, self.rank)
        a = reader.read(f"{self.layer}linear_in.weight", (*index, 0, 0), a_sizes)
        b = reader.read(f"{self.layer}linear_out.weight", (*index, self.unit.row, 0), b_sizes)
        rows_of_parts = [shape[0] for shape in self.unit.hf_shapes]
        # Rows of B are divided like rows of W, so the unit's op takes them apart.
        b_of_parts = self.unit.op.split(b.reshape(rows, self.rank), rows_of_parts, family.dims)
        return a.reshape(self.rank, columns), b_of_parts


@dataclass(frozen=True)
class Adapted:
    """A base model and its adapters.

    Attributes:
        family: family of the base.
        weights: weights of the base.
        reader: reader of the checkpoint with the adapters.
        adapters: unit of the base -> the adapter that updates it.
        alpha: alpha of all adapters.
        is_rank_stabilized: the scale is alpha / sqrt(rank) (2312.03732), not alpha / rank.
    """

    family: Family
    weights: SafetensorsFolder
    reader: TorchDistReader
    adapters: dict[Unit, Adapter]
    alpha: float
    is_rank_stabilized: bool = False

    def scale(self, adapter: Adapter) -> float:
        """Return the factor of B A."""
        divisor = math.sqrt(adapter.rank) if self.is_rank_stabilized else adapter.rank
        return self.alpha / divisor


@contextmanager
def open_adapted(
    megatron_checkpoint: Path,
    base: Path,
    config_folder: Path,
    alpha: float | None,
    num_workers: int,
    *,
    by_peft: bool = False,
) -> Iterator[Adapted]:
    """Open a checkpoint's adapters and their base. Refuse a checkpoint that has other trained weights, too.

    Args:
        megatron_checkpoint: checkpoint that holds the adapters.
        base: Hugging Face folder of the model that was adapted.
        config_folder: folder whose config.json describes the adapted model.
        alpha: alpha of the adapters; None: from the checkpoint's run_config.yaml.
        num_workers: number of threads that compare the checkpoint's other weights with the base.
        by_peft: True: PEFT will apply the adapters, so adapters that it does not support are refused.
    """
    with open_model(base) as (family, weights), closing(TorchDistReader(megatron_checkpoint)) as reader:
        if by_peft and family.prefix:
            raise UserError(
                f"--lora adapter: {family.config['architectures'][0]} has no PEFT names; use --lora merge"
            )
        adapted_family = family_for(hf_config(config_folder))
        _check_fits(adapted_family, config_folder, family, base)
        path = reader.folder / RUN_CONFIG
        check_run_config(adapted_family, path)
        adapters = _find_adapters(family, reader)
        peft = read_section(path, "peft")
        alpha = _alpha(path, peft, alpha)
        _check_kind(path, peft, adapters.values())
        if by_peft:
            _check_peft_applies(family, adapters)
        _check_nothing_is_lost(family, weights, reader, num_workers)
        yield Adapted(family, weights, reader, adapters, alpha, _uses_rslora(path, peft))


def _check_fits(adapted: Family, config_folder: Path, base: Family, base_folder: Path) -> None:
    """Refuse a config.json that describes another model than the base's.

    Settings such as the numbers of heads may differ without a difference in shapes.
    """
    properties = _properties(adapted)
    base_properties = _properties(base)
    for name in {**base_properties, **properties}:
        value = properties.get(name)
        base_value = base_properties.get(name)
        if value != base_value:
            raise UserError(
                f"--hf-config {config_folder} is of another model than --base {base_folder}: {name} is "
                f"{value}, not {base_value}; give the adapted model's, or leave --hf-config out"
            )


def _properties(family: Family) -> dict[str, Any]:
    """Return the properties that two configs of the same weights share: kind, heads and all shapes."""
    return {
        "model_type": family.spec.model_type,
        "num_attention_heads": family.spec.num_attention_heads,
        "num_key_value_heads": family.spec.num_key_value_heads,
        **family.hf_shapes,
    }


def _check_peft_applies(family: Family, adapters: Iterable[Unit]) -> None:
    """Refuse adapters that PEFT 0.21 drops in models with experts.

    It takes every ``gate_proj``, ``up_proj`` and ``down_proj`` for the routed experts', also those of dense
    layers and shared experts, and adapts no router but Qwen3-MoE's.
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
    """Refuse weights besides the adapters and the frozen base."""
    places, lost_names = locate_beside_adapters(family, reader)

    def compare(place: Place) -> None:
        # A base that was rounded on its way into Megatron is still the base.
        if any(not gap.imports for gap in gaps_of(place, family, weights, reader)):
            lost_names.add(place.name)
        advance()

    if places and not lost_names:
        with progress("compare with --base", len(places)) as advance:
            run_parallel(places, compare, num_workers)
    if lost_names:
        raise UserError(
            f"{reader.folder} holds what is neither an adapter nor equal to --base {weights.folder}, and "
            f"--lora would lose it: {listed(lost_names)}; give the base that was adapted, or export the "
            "checkpoint with Megatron-Bridge"
        )


def _find_adapters(family: Family, reader: TorchDistReader) -> dict[Unit, Adapter]:
    """Find the adapter of each unit, and refuse adapters of anything else."""
    stored_shapes = {name: key.shape for name, key in reader.weights.items() if ADAPTER in name}
    adapters: dict[Unit, Adapter] = {}
    supported_names: set[str] = set()
    for unit in family.units():
        layer = unit.storage.key.removesuffix("weight") + ADAPTER.removeprefix(".")
        name_of_a = f"{layer}linear_in.weight"
        name_of_b = f"{layer}linear_out.weight"
        if not unit.op.moves_rows or name_of_a not in stored_shapes or name_of_b not in stored_shapes:
            continue
        supported_names |= {name_of_a, name_of_b}
        stack = unit.storage.stack
        rank = stored_shapes[name_of_a][len(stack)]
        shapes = [stored_shapes[name_of_a], stored_shapes[name_of_b]]
        expected = [(*stack, rank, unit.shape[1]), (*stack, unit.tensor_rows, rank)]
        if shapes != expected:
            raise UserError(f"{layer}* is {shapes}, the base says {expected}")
        adapters[unit] = Adapter(unit, rank, layer)
    unsupported_names = set(stored_shapes) - supported_names
    if unsupported_names:
        raise UserError(f"adapters of a kind that is not supported: {listed(unsupported_names)}")
    if not adapters:
        raise UserError(f"{reader.folder} has no LoRA adapters; convert it without --lora")
    return adapters


def _check_kind(path: Path, peft: Mapping[str, Any], adapters: Iterable[Adapter]) -> None:
    """Refuse adapters that do not compute W x + scale B A x, or whose rank is not that of run_config.yaml.

    Args:
        path: run_config.yaml.
        peft: section of that file about the adapters.
        adapters: the adapters in the checkpoint.
    """
    kind = str(peft.get("_target_", _KINDS[0])).rpartition(".")[2]
    if kind not in _KINDS:
        raise UserError(
            f"{path}: peft._target_ is {kind:.60}, and only {' and '.join(_KINDS)} are exported; export the "
            "checkpoint with Megatron-Bridge"
        )
    rank = peft.get("dim")
    for adapter in adapters:
        if rank is not None and rank != adapter.rank:
            raise UserError(
                f"{path}: peft.dim is {rank!r:.60}, but {adapter.layer}* has rank {adapter.rank}; restore "
                "the file of this training"
            )


def _uses_rslora(path: Path, peft: Mapping[str, Any]) -> bool:
    """Return True if the adapters are rank-stabilized."""
    value = peft.get("use_rslora", False)
    if not isinstance(value, bool):
        raise UserError(f"{path}: peft.use_rslora is {value!r:.60}, not true or false; restore the file")
    return value


def _alpha(path: Path, peft: Mapping[str, Any], option: float | None) -> float:
    """Read alpha from ``--lora-alpha``, or else from run_config.yaml."""
    origin = "--lora-alpha"
    alpha: Any = option
    if option is None:
        origin = f"{path}: peft.alpha"
        alpha = peft.get("alpha")
    if alpha is None:
        raise UserError(f"{path} does not say peft.alpha; give it with --lora-alpha")
    # Every comparison with NaN is false, so this refuses NaN, too.
    is_finite = type(alpha) in (int, float) and abs(alpha) <= sys.float_info.max
    if not is_finite:
        raise UserError(f"{origin} is {alpha!r:.60}, no finite number; give the training's with --lora-alpha")
    return float(alpha)
