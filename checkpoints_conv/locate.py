"""Places of a model's units in a Hugging Face folder and in a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.dtypes import FP8_BLOCK, WEIGHT_DTYPES
from checkpoints_conv.formats.pieces import Buffer, same
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import Block, TorchDistReader
from checkpoints_conv.run_config import RUN_CONFIG, check_run_config
from nemo_grpo.models import Family, family_for
from nemo_grpo.models.family import Unit, refuse_shape, refuse_unmatched, refuse_untied
from nemo_grpo.models.shared_mappings import HF_OUTPUT
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = ".adapter."
_ROWS = 64
"""Rows of two embeddings compared at a time."""


@contextmanager
def open_model(folder: Path) -> Iterator[tuple[Family, SafetensorsFolder]]:
    """Open a model folder; yields its family and its weights."""
    config = hf_config(folder)
    family = family_for(config)
    check_no_other_weights(folder, config)
    block = _fp8_block(folder, config)
    with closing(SafetensorsFolder(folder, family.pieces, family.aliases, fp8_block=block)) as weights:
        family.check_hf(weights.shapes)
        if family.tied and HF_OUTPUT in weights.tensors:
            names = (family.hf_embedding, HF_OUTPUT)
            sides = (partial(weights.read_rows, name, buffer=Buffer()) for name in names)
            embedding, output = (weights.shapes[name] for name in names)
            _check_tied(family, embedding, output, *sides)
        yield family, weights


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Read rows and columns of FP8's blocks from config.json."""
    quantization = config.get("quantization_config")
    stated = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if stated is None:
        return FP8_BLOCK
    is_block = isinstance(stated, list) and len(stated) == 2
    if not is_block or not all(type(size) is int and 0 < size < 1 << 24 for size in stated):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config.weight_block_size={stated!r:.60} is not a "
            "block's rows and columns; download it again"
        )
    rows, columns = stated
    return rows, columns


def _check_tied(
    family: Family, shape: tuple[int, ...], other: tuple[int, ...], *sides: Callable[[int, int], memoryview]
) -> None:
    """Compare two embeddings, each given by (first row, number of rows) -> bytes."""
    if shape != other:
        refuse_untied(family.tied_by)
    for first in range(0, shape[0], _ROWS):
        one, two = (read(first, min(_ROWS, shape[0] - first)) for read in sides)
        if not same(one, two):
            refuse_untied(family.tied_by)


@dataclass(frozen=True)
class Place:
    """A unit's block. Attributes: unit; name: key; start, sizes: one number per axis of the key."""

    unit: Unit
    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    def open(self, reader: TorchDistReader) -> AbstractContextManager[Block]:
        """Open the unit's rows, from first to last."""
        axis = len(self.sizes) - len(self.unit.shape)
        return reader.block(self.name, self.start, self.sizes, axis)

    def read(self, reader: TorchDistReader) -> Tensor:
        """Read the unit's tensor, [rows, ...]."""
        return reader.read(self.name, self.start, self.sizes).reshape(self.unit.shape)


def locate(
    family: Family, reader: TorchDistReader, lora_remedy: str = "use --lora merge or --lora adapter"
) -> list[Place]:
    """Find every unit of the model; refuse a checkpoint with anything else.

    Args: lora_remedy: for a checkpoint of adapters.
    """
    check_run_config(family, reader.folder / RUN_CONFIG)
    stored = {name: key.shape for name, key in reader.weights.items()}
    if any(ADAPTER in name for name in stored):
        raise UserError(f"{reader.folder} has LoRA adapters; {lora_remedy}")
    names, missing, extra = _match(family, stored)
    refuse_unmatched("Megatron", missing, extra)
    return _places(family, reader, names)


def locate_beside_adapters(family: Family, reader: TorchDistReader) -> tuple[list[Place], set[str]]:
    """Find the model's own units in a checkpoint of adapters, and the names of what is neither."""
    stored = {name: key.shape for name, key in reader.weights.items() if ADAPTER not in name}
    names, _missing, extra = _match(family, stored)
    return _places(family, reader, names), extra


def _match(
    family: Family, stored: Mapping[str, tuple[int, ...]]
) -> tuple[dict[Unit, str], set[str], set[str]]:
    """Return the key of every stored unit, the keys of missing units, and keys of no unit."""
    names, missing = {}, set()
    for unit in family.units():
        if name := next((key for key in (*unit.stacked_keys, *unit.layer_keys) if key in stored), None):
            names[unit] = name
        else:
            missing.add(unit.key)
    extra = family.converted(stored) - set(names.values()) - {twin for unit in names for twin in unit.twins}
    embedding, output = family.tied_names
    if family.tied and embedding in stored:
        extra -= {output}
    return names, missing, extra


def _places(family: Family, reader: TorchDistReader, names: Mapping[Unit, str]) -> list[Place]:
    places, stored = [], {name: reader.keys[name].shape for name in names.values()}
    for unit, name in names.items():
        _check_shape(unit, name, stored[name])
        index = unit.index if name in unit.stacked_keys else ()
        start = (*index, unit.row, *(0 for _ in unit.shape[1:]))
        places.append(Place(unit, name, start, (*(1 for _ in index), *unit.shape)))
    for name in {place.name for place in places}:
        if reader.keys[name].dtype not in WEIGHT_DTYPES:
            raise UserError(
                f"{name} is stored as {reader.keys[name].dtype}; save the weights in bf16, fp16 or fp32"
            )
    if family.tied and reader.weights.keys() >= set(family.tied_names):
        shapes = [reader.keys[name].shape for name in family.tied_names]
        both = (
            reader.block(name, (0, 0), shape, 0)
            for name, shape in zip(family.tied_names, shapes, strict=True)
        )
        with next(both) as embedding, next(both) as output:
            _check_tied(
                family,
                shapes[0],
                shapes[1],
                lambda _, count: embedding.read(count),
                lambda _, count: output.read(count),
            )
    return places


def _check_shape(unit: Unit, name: str, found: tuple[int, ...]) -> None:
    stack = unit.stack if name in unit.stacked_keys else ()
    expected = (*stack, unit.rows, *unit.shape[1:])
    padded = (*found[: len(stack)], unit.rows, *found[len(stack) + 1 :]) if unit.padded else found
    if len(found) != len(expected) or padded != expected or found[len(stack)] < unit.rows:
        refuse_shape(name, found, expected)
