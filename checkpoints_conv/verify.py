"""Bitwise comparison of a Hugging Face model and a Megatron checkpoint, tensor by tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import Dtype, byte_view, tensor_of
from checkpoints_conv.formats.pieces import PIECE_BYTES, Buffer, same
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import Block, TorchDistReader
from checkpoints_conv.job import run_parallel
from checkpoints_conv.locate import Place, locate, open_model
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.models import Family, family_for
from nemo_grpo.models.ops import Dims
from nemo_grpo.models.shared_mappings import whole_name
from nemo_grpo.models.units import Unit
from nemo_grpo.support.files import check_sha256
from nemo_grpo.support.progress import progress


@dataclass
class Comparison:
    """Result of `verify`.

    Attributes:
        compared: names of the Hugging Face tensors that were compared.
        different: tensors whose bits differ: name -> largest difference.
        rounded: tensors whose bits differ only because a conversion rounded them: name -> largest difference.
            Converting one side gives the other.
        num_hashed: number of files that were checked against a ``SHA256SUMS``.
        cast: pairs (Hugging Face, Megatron) of different dtypes. The Hugging Face numbers were converted to
            Megatron's dtype before they were compared.
    """

    compared: set[str] = field(default_factory=set)
    different: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    num_hashed: int = 0
    cast: set[tuple[Dtype, Dtype]] = field(default_factory=set)

    @property
    def num_tensors(self) -> int:
        return len(self.compared)

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON's types. A difference of NaN becomes null."""
        return {
            "num_tensors": self.num_tensors,
            "different": _without_nan(self.different),
            "rounded": _without_nan(self.rounded),
            "cast": sorted([_short(hf), _short(megatron)] for hf, megatron in self.cast),
            "num_hashed": self.num_hashed,
        }


def _without_nan(differences: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN, which JSON does not have, by None."""
    return {
        name: None if math.isnan(difference) else difference
        for name, difference in sorted(differences.items())
    }


def _short(dtype: Dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Gap:
    """Difference between the two sides of a piece whose bits differ.

    Attributes:
        size: the largest difference.
        imports: Megatron's numbers are what the Hugging Face ones convert to.
        exports: the Hugging Face numbers are what Megatron's convert to.
    """

    size: float
    imports: bool = False
    exports: bool = False


def verify(hf_model: str | Path, megatron_checkpoint: str | Path, num_workers: int = 2) -> Comparison:
    """Compare every tensor of a model folder and a checkpoint, with a few megabytes of memory per worker.

    Raises: UserError: a folder cannot be read, or is of another model.
    """
    hf_model = Path(hf_model)
    megatron_checkpoint = Path(megatron_checkpoint)
    with (
        open_model(hf_model) as (family, weights),
        closing(TorchDistReader(megatron_checkpoint)) as reader,
    ):
        remedy = "verify compares whole models; `megatron-to-hf --lora merge` exports the merged one"
        places = locate(family, reader, remedy)
        result = Comparison()
        lock = threading.Lock()
        folders = {hf_model, reader.folder, reader.folder.parent}
        result.num_hashed = sum(check_sha256(folder) for folder in folders)

        def compare(place: Place) -> None:
            gaps = gaps_of(place, family, weights, reader)
            megatron_dtype = reader.keys[place.name].dtype
            names = place.unit.hf
            with lock:
                result.compared |= {whole_name(name) for name in names}
                for name in names:
                    hf_dtype = weights.tensors[name].dtype
                    if hf_dtype != megatron_dtype:
                        result.cast.add((hf_dtype, megatron_dtype))
                if gaps:
                    is_rounding = all(gap.imports or gap.exports for gap in gaps)
                    differences = result.rounded if is_rounding else result.different
                    differences.update(dict.fromkeys(names, _largest(gaps)))
            advance(amount=sum(weights.tensors[name].num_bytes for name in names))

        total = sum(weights.tensors[name].num_bytes for name in family.hf_shapes)
        with progress("verify", total, in_bytes=True) as advance:
            run_parallel(places, compare, num_workers)
    return result


def _largest(gaps: Sequence[Gap]) -> float:
    """Return the largest difference; NaN counts as larger than every number."""
    return max((gap.size for gap in gaps), key=lambda size: (math.isnan(size), size))


def gaps_of(place: Place, family: Family, weights: SafetensorsFolder, reader: TorchDistReader) -> list[Gap]:
    """Compare a unit piece by piece, in Megatron's dtype, and return the gaps of pieces whose bits differ."""
    unit = place.unit
    with place.open(reader) as block:
        if unit.op.computes:
            return _computed_gaps(unit, weights, block, family.dims)
        if unit.op.moves_rows:
            gaps = list(_gaps_by_piece(unit, weights, block, family.dims))
        else:
            whole = unit.op.join([weights.read(name) for name in unit.hf], family.dims).contiguous()
            hf_dtype = weights.tensors[unit.hf[0]].dtype
            gaps = [_gap(byte_view(whole), hf_dtype, block.read(unit.tensor_rows), block.dtype)]
    return [gap for gap in gaps if gap is not None]


def _gaps_by_piece(unit: Unit, weights: SafetensorsFolder, block: Block, dims: Dims) -> Iterator[Gap | None]:
    """Compare a unit a few rows at a time, in the order of Megatron's rows."""
    buffer = Buffer()
    for rows in unit.pieces(dims, PIECE_BYTES // block.dtype.itemsize):
        name = unit.hf[rows.part]
        hf = weights.read_rows(name, rows.first, rows.count, buffer)
        yield _gap(hf, weights.tensors[name].dtype, block.read(rows.count), block.dtype)


def _gap(hf: memoryview, hf_dtype: Dtype, megatron: memoryview, dtype: Dtype) -> Gap | None:
    """Compare two pieces in Megatron's dtype. Return their largest difference, or None if they are equal."""
    if hf_dtype != dtype:
        hf = byte_view(tensor_of(hf, hf_dtype).to(dtype.torch))
    if same(hf, megatron):
        return None
    return Gap(_largest_difference(tensor_of(hf, dtype), tensor_of(megatron, dtype)))


def _computed_gaps(unit: Unit, weights: SafetensorsFolder, block: Block, dims: Dims) -> list[Gap]:
    """Compare a unit whose numbers the conversion changes: converting each side must give the other's bits.

    The import alone would pass a checkpoint whose numbers were rounded on the way in. It would also fail one
    that trained further, because the export had to round its numbers.
    """
    hf = [weights.read(name) for name in unit.hf]
    megatron = tensor_of(block.read(unit.tensor_rows), block.dtype, unit.shape)
    imported = unit.op.join(hf, dims).to(megatron.dtype)
    exported = unit.op.split(megatron, [len(part) for part in hf], dims)
    imports = torch.equal(imported, megatron)
    pairs = list(zip(exported, hf, strict=True))
    exports = all(torch.equal(back.to(part.dtype), part) for back, part in pairs)
    if imports and exports:
        return []
    size = max(_largest_difference(back, part) for back, part in pairs)
    return [Gap(size, imports, exports)]


def _largest_difference(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).abs().max())


def read_megatron(config: dict[str, object], checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint into memory, under its local-spec name."""
    family = family_for(config)
    reader = TorchDistReader(Path(checkpoint))
    blocks: dict[str, list[torch.Tensor]] = {}
    for place in locate(family, reader):
        # Units of a tensor come in the order of its rows.
        blocks.setdefault(place.unit.megatron, []).append(place.read(reader))
    reader.close()
    return {name: torch.cat(blocks_of_tensor) for name, blocks_of_tensor in blocks.items()}
