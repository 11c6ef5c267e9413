"""Places of a model's units in a Hugging Face folder and in a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_conv.formats.dtypes import FP8_BLOCK, WEIGHT_DTYPES
from checkpoints_conv.formats.pieces import Buffer, same
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import Block, TorchDistReader
from checkpoints_conv.run_config import RUN_CONFIG, check_run_config
from nemo_grpo.models import Family, family_for
from nemo_grpo.models.refusals import refuse_shape, refuse_unmatched, refuse_untied
from nemo_grpo.models.shared_mappings import HF_OUTPUT
from nemo_grpo.models.units import Unit
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = ".adapter."
"""Part of the keys of LoRA adapters."""
_ROWS = 64
"""Rows of two embeddings compared at a time."""


@contextmanager
def open_model(folder: Path) -> Iterator[tuple[Family, SafetensorsFolder]]:
    """Open a model folder, check it, and yield its family and its weights."""
    config = hf_config(folder)
    family = family_for(config)
    check_no_other_weights(folder, config)
    block = _fp8_block(folder, config)
    with closing(SafetensorsFolder(folder, family.pieces, family.aliases, fp8_block=block)) as weights:
        family.check_hf(weights.shapes)
        if family.tied and HF_OUTPUT in weights.tensors:
            _check_tied_weights(family, weights)
        yield family, weights


def _check_tied_weights(family: Family, weights: SafetensorsFolder) -> None:
    embedding_buffer = Buffer()
    output_buffer = Buffer()
    _check_tied(
        family,
        weights.shapes[family.hf_embedding],
        weights.shapes[HF_OUTPUT],
        lambda first, count: weights.read_rows(family.hf_embedding, first, count, embedding_buffer),
        lambda first, count: weights.read_rows(HF_OUTPUT, first, count, output_buffer),
    )


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Read rows and columns of FP8's blocks from config.json."""
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block is None:
        return FP8_BLOCK
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size < 1 << 24 for size in block):
        raise UserError(
            f"{folder / 'config.json'}: quantization_config.weight_block_size={block!r:.60} is not a "
            "block's rows and columns; download it again"
        )
    rows, columns = block
    return rows, columns


ReadRows = Callable[[int, int], memoryview]
"""(first row, number of rows) -> their bytes."""


def _check_tied(
    family: Family,
    embedding_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    read_embedding: ReadRows,
    read_output: ReadRows,
) -> None:
    """Refuse an output layer that differs from the embedding. They are compared a few rows at a time."""
    if embedding_shape != output_shape:
        refuse_untied(family.tied_by)
    num_rows = embedding_shape[0]
    for first in range(0, num_rows, _ROWS):
        count = min(_ROWS, num_rows - first)
        if not same(read_embedding(first, count), read_output(first, count)):
            refuse_untied(family.tied_by)


@dataclass(frozen=True)
class Place:
    """Place of a unit in one checkpoint.

    Attributes:
        unit: the unit.
        name: the checkpoint's key that holds it.
        start: first index on each axis of the key.
        sizes: length on each axis of the key.
    """

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
    """Find the place of every unit of the model, and refuse a checkpoint that holds other weights, too.

    Args:
        family: the model.
        reader: the checkpoint.
        lora_remedy: remedy in the message that refuses a checkpoint with adapters.
    """
    check_run_config(family, reader.folder / RUN_CONFIG)
    stored = {name: key.shape for name, key in reader.weights.items()}
    if any(ADAPTER in name for name in stored):
        raise UserError(f"{reader.folder} has LoRA adapters; {lora_remedy}")
    names, absent_keys, extra_keys = _match(family, stored)
    refuse_unmatched("Megatron", absent_keys, extra_keys)
    return _places(family, reader, names)


def locate_beside_adapters(family: Family, reader: TorchDistReader) -> tuple[list[Place], set[str]]:
    """Find the base model's units in a checkpoint with adapters.

    Returns: the places of these units; the keys that are neither adapters nor units of the model.
    """
    stored = {name: key.shape for name, key in reader.weights.items() if ADAPTER not in name}
    # A checkpoint of adapters may hold none of the base, so absent keys are no fault.
    names, _absent_keys, extra_keys = _match(family, stored)
    return _places(family, reader, names), extra_keys


def _match(
    family: Family, stored: Mapping[str, tuple[int, ...]]
) -> tuple[dict[Unit, str], set[str], set[str]]:
    """Match the keys of a checkpoint with the units of a model.

    Args:
        family: the model.
        stored: key -> shape.
    Returns: stored unit -> its key; keys of units that are not stored; stored keys that belong to no unit.
    """
    names: dict[Unit, str] = {}
    absent_keys: set[str] = set()
    twins: set[str] = set()
    for unit in family.units():
        keys = (*unit.storage.stacked_keys, *unit.storage.unstacked_keys)
        # A stacked key, as megatron-core writes it, comes before the keys of one layer.
        stored_keys = [key for key in keys if key in stored]
        if stored_keys:
            names[unit] = stored_keys[0]
            twins.update(unit.storage.twins)
        else:
            absent_keys.add(unit.storage.key)
    extra_keys = family.converted(stored) - set(names.values()) - twins
    embedding, output = family.tied_names
    if family.tied and embedding in stored:
        # Some writers store the tied output layer, too; `_places` compares it with the embedding.
        extra_keys.discard(output)
    return names, absent_keys, extra_keys


def _places(family: Family, reader: TorchDistReader, names: Mapping[Unit, str]) -> list[Place]:
    """Find the block of each unit in its key, and check the key's shape and dtype."""
    places = []
    for unit, name in names.items():
        _check_shape(unit, name, reader.keys[name].shape)
        index = unit.storage.index if name in unit.storage.stacked_keys else ()
        columns = tuple(0 for _ in unit.shape[1:])
        start = (*index, unit.row, *columns)
        sizes = (*(1 for _ in index), *unit.shape)
        places.append(Place(unit, name, start, sizes))
    for place in places:
        dtype = reader.keys[place.name].dtype
        if dtype not in WEIGHT_DTYPES:
            raise UserError(f"{place.name} is stored as {dtype}; save the weights in bf16, fp16 or fp32")
    if family.tied and reader.weights.keys() >= set(family.tied_names):
        _check_tied_keys(family, reader)
    return places


def _check_tied_keys(family: Family, reader: TorchDistReader) -> None:
    embedding_name, output_name = family.tied_names
    embedding_shape = reader.keys[embedding_name].shape
    output_shape = reader.keys[output_name].shape
    with (
        reader.block(embedding_name, (0, 0), embedding_shape, 0) as embedding,
        reader.block(output_name, (0, 0), output_shape, 0) as output,
    ):
        # A block is read from front to end, so it needs no first row.
        _check_tied(
            family,
            embedding_shape,
            output_shape,
            lambda _first, count: embedding.read(count),
            lambda _first, count: output.read(count),
        )


def _check_shape(unit: Unit, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a key whose shape is not the one that config.json gives. The vocabulary's rows may be padded."""
    stack = unit.storage.stack if name in unit.storage.stacked_keys else ()
    expected = (*stack, unit.tensor_rows, *unit.shape[1:])
    if len(shape) != len(expected):
        refuse_shape(name, shape, expected)
    rows_axis = len(stack)
    without_padding = shape
    if unit.padded and shape[rows_axis] >= unit.tensor_rows:
        without_padding = (*shape[:rows_axis], unit.tensor_rows, *shape[rows_axis + 1 :])
    if without_padding != expected:
        refuse_shape(name, shape, expected)
