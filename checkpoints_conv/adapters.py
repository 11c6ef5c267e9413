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
from nemo_grpo.models.family import Unit
from nemo_grpo.support.errors import UserError, listed
from nemo_grpo.support.model_folder import hf_config
from nemo_grpo.support.progress import progress

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = ("LoRA", "VLMLoRA")
"""Megatron-Bridge's classes of adapters that are read; DoRA and CanonicalLoRA compute something else."""


@dataclass(frozen=True)
class Adapter:
    """The low-rank update of one unit. Attributes: unit; rank; layer: its key without the last part."""

    unit: Unit
    rank: int
    layer: str

    def read(self, reader: TorchDistReader, family: Family) -> tuple[Tensor, list[Tensor]]:
        """Read A [r, in], and B [out, r] of every Hugging Face tensor of the unit."""
        index, ones = self.unit.index, tuple(1 for _ in self.unit.index)
        columns, rows = self.unit.shape[1], self.unit.shape[0]
        a = reader.read(f"{self.layer}linear_in.weight", (*index, 0, 0), (*ones, self.rank, columns))
        b = reader.read(
            f"{self.layer}linear_out.weight", (*index, self.unit.row, 0), (*ones, rows, self.rank)
        )
        heights = [shape[0] for shape in self.unit.hf_shapes]
        parts = self.unit.op.split(b.reshape(rows, self.rank), heights, family.dims)
        return a.reshape(self.rank, columns), parts


@dataclass(frozen=True)
class Adapted:
    """A base and its adapters.

    Attributes: family, weights: of the base.  reader: of the checkpoint.  adapters: by the units that they
                update.  alpha: of all of them.
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
        return self.alpha / (math.sqrt(adapter.rank) if self.is_rank_stabilized else adapter.rank)


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
    """Open a checkpoint's adapters and their base; refuse a checkpoint with other trained weights.

    Args: config_folder: whose config.json describes the adapted model.
          alpha: None: from the checkpoint's run_config.yaml.
          by_peft: PEFT will apply the adapters.
    """
    with open_model(base) as (family, weights), closing(TorchDistReader(megatron_checkpoint)) as reader:
        if by_peft and family.prefix:
            raise UserError(
                f"--lora adapter: {family.config['architectures'][0]} has no PEFT names; use --lora merge"
            )
        described = family_for(hf_config(config_folder))
        _check_fits(described, config_folder, family, base)
        path = reader.folder / RUN_CONFIG
        check_run_config(described, path)
        adapters, peft = _find(family, reader), read_section(path, "peft")
        alpha = _alpha(path, peft, alpha)
        _check_kind(path, peft, adapters.values())
        if by_peft:
            _check_peft_applies(family, adapters)
        _check_nothing_is_lost(family, weights, reader, num_workers)
        yield Adapted(family, weights, reader, adapters, alpha, _uses_rslora(path, peft))


def _check_fits(described: Family, folder: Path, family: Family, base: Path) -> None:
    """Compare a config.json with the base's; training may have overridden what shapes do not show."""
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
    places, lost = locate_beside_adapters(family, reader)

    def compare(place: Place) -> None:
        # A base that was rounded on its way into Megatron is still the base.
        if any(not gap.imports for gap in gaps_of(place, family, weights, reader)):
            lost.add(place.name)
        advance()

    if places and not lost:
        with progress("compare with --base", len(places)) as advance:
            run_parallel(places, compare, num_workers)
    if lost:
        raise UserError(
            f"{reader.folder} holds what is neither an adapter nor equal to --base {weights.folder}, and "
            f"--lora would lose it: {listed(lost)}; give the base that was adapted, or export the checkpoint "
            "with Megatron-Bridge"
        )


def _find(family: Family, reader: TorchDistReader) -> dict[Unit, Adapter]:
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
    if unknown := set(stored) - known:
        raise UserError(f"adapters of a kind that is not supported: {listed(unknown)}")
    if not found:
        raise UserError(f"{reader.folder} has no LoRA adapters; convert it without --lora")
    return found


def _check_kind(path: Path, peft: Mapping[str, Any], adapters: Iterable[Adapter]) -> None:
    """Refuse adapters that are computed otherwise than W x + scale B A x, or are of another training.

    Args: path, peft: run_config.yaml, and its section of the adapters.
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
    value = peft.get("use_rslora", False)
    if not isinstance(value, bool):
        raise UserError(f"{path}: peft.use_rslora is {value!r:.60}, not true or false; restore the file")
    return value


def _alpha(path: Path, peft: Mapping[str, Any], given: float | None) -> float:
    name, alpha = "--lora-alpha", given
    if given is None:
        name, alpha = f"{path}: peft.alpha", peft.get("alpha")
    if alpha is None:
        raise UserError(f"{path} does not say peft.alpha; give it with --lora-alpha")
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:  # nor is NaN
        raise UserError(f"{name} is {alpha!r:.60}, no finite number; give the training's with --lora-alpha")
    return float(alpha)
