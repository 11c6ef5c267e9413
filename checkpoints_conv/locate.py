"""Places of a model's pieces in a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpoints_conv.formats.dtypes import WEIGHT_DTYPES
from checkpoints_conv.formats.pieces import same
from checkpoints_conv.formats.torch_dist import Block, TorchDistReader
from checkpoints_conv.run_config import RUN_CONFIG, check_run_config
from nemo_grpo.models import Family
from nemo_grpo.models.family import Unit, refuse_shape, refuse_unmatched, refuse_untied
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = ".adapter."


@dataclass(frozen=True)
class Place:
    """A unit's block. Attributes: unit; name: key; start, sizes: one number per axis of the key."""

    unit: Unit
    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    def open(self, reader: TorchDistReader) -> AbstractContextManager[Block]:
        """The unit's rows, from first to last."""
        axis = len(self.sizes) - len(self.unit.shape)
        return reader.block(self.name, self.start, self.sizes, axis)

    def read(self, reader: TorchDistReader) -> Tensor:
        """The unit's tensor, [rows, ...], in memory."""
        return reader.read(self.name, self.start, self.sizes).reshape(self.unit.shape)


def locate(family: Family, reader: TorchDistReader) -> list[Place]:
    """Find every unit of the model, and that nothing else is there.

    Raises: UserError: tensors are missing or left over, or sizes differ from config.json.
    """
    check_run_config(family, reader.folder / RUN_CONFIG)
    stored = {name: key.shape for name, key in reader.weights.items()}
    if any(ADAPTER in name for name in stored):
        raise UserError(f"{reader.folder} has LoRA adapters; use --lora merge or --lora adapter")
    names, missing, extra = _match(family, stored)
    refuse_unmatched("Megatron", missing, extra)
    return _places(family, reader, names)


def locate_beside_adapters(family: Family, reader: TorchDistReader) -> tuple[list[Place], set[str]]:
    """Find the model's own units in a checkpoint of adapters, and the names of what is neither.

    Raises: UserError: sizes differ from config.json.
    """
    stored = {name: key.shape for name, key in reader.weights.items() if ADAPTER not in name}
    names, _missing, extra = _match(family, stored)
    return _places(family, reader, names), extra


def _match(
    family: Family, stored: Mapping[str, tuple[int, ...]]
) -> tuple[dict[Unit, str], set[str], set[str]]:
    """The key of every unit that is stored, the keys of the others, and keys of no unit."""
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
        _check_tied(reader, *family.tied_names)
    return places


def _check_tied(reader: TorchDistReader, *names: str) -> None:
    shape, other = (reader.keys[name].shape for name in names)
    if other != shape:
        refuse_untied()
    both = (reader.block(name, (0, 0), shape, 0) for name in names)
    rows, step = shape[0], 64
    with next(both) as embedding, next(both) as output:
        for row in range(0, rows, step):
            count = min(step, rows - row)
            if not same(embedding.read(count), output.read(count)):
                refuse_untied()


def _check_shape(unit: Unit, name: str, found: tuple[int, ...]) -> None:
    stack = unit.stack if name in unit.stacked_keys else ()
    expected = (*stack, unit.rows, *unit.shape[1:])
    padded = (*found[: len(stack)], unit.rows, *found[len(stack) + 1 :]) if unit.padded else found
    if len(found) != len(expected) or padded != expected or found[len(stack)] < unit.rows:
        refuse_shape(name, found, expected)
