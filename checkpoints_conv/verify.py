"""Are a Hugging Face model and a Megatron checkpoint the same model? Tensor by tensor, bit by bit."""

from __future__ import annotations

import math
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_conv.dtypes import Dtype, byte_view, tensor_of
from checkpoints_conv.families import family_for
from checkpoints_conv.families.family import Family
from checkpoints_conv.job import check_sha256, run_parallel
from checkpoints_conv.locate import Place, locate
from checkpoints_conv.model_folder import hf_config
from checkpoints_conv.pieces import Buffer, same
from checkpoints_conv.progress import byte_progress
from checkpoints_conv.safetensors_io import SafetensorsFolder
from checkpoints_conv.torch_dist import TorchDistReader
from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    import torch
else:
    from nemo_grpo.core.lazy import torch

_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
LOGITS_TOLERANCE = 1e-4


@dataclass
class Comparison:
    """The outcome.

    Attributes:
        num_tensors: Hugging Face tensors compared.
        different: names whose bits differ, with the largest difference.
        num_hashed: files that were checked against a ``SHA256SUMS``.
        cast: (Hugging Face, Megatron) dtypes where they differ; the former was converted before comparing.
    """

    num_tensors: int = 0
    different: dict[str, float] = field(default_factory=dict)
    num_hashed: int = 0
    cast: set[tuple[Dtype, Dtype]] = field(default_factory=set)


def verify(hf_model: Path, megatron_checkpoint: Path, num_workers: int = 2) -> Comparison:
    """Compare every tensor; a few megabytes in memory per worker.

    Raises: UserError: one side does not fit config.json, or a file is damaged or not what SHA256SUMS says.
    """
    family = family_for(hf_config(hf_model))
    with (
        closing(SafetensorsFolder(hf_model)) as weights,
        closing(TorchDistReader(megatron_checkpoint)) as reader,
    ):
        expected = {n: s for unit in family.units() for n, s in zip(unit.hf, unit.hf_shapes, strict=True)}
        family.check_hf(weights.shapes, expected)
        places = locate(family, reader)
        result, lock = Comparison(), threading.Lock()
        folders = {hf_model, reader.folder, reader.folder.parent}
        result.num_hashed = sum(check_sha256(folder) for folder in folders)

        def compare(place: Place) -> None:
            _compare(place, family, weights, reader, result, lock)
            advance(sum(weights.tensors[name].num_bytes for name in place.unit.hf))

        with byte_progress("verify", sum(weights.tensors[name].num_bytes for name in expected)) as advance:
            run_parallel(places, compare, num_workers)
    return result


def _compare(
    place: Place,
    family: Family,
    weights: SafetensorsFolder,
    reader: TorchDistReader,
    result: Comparison,
    lock: threading.Lock,
) -> None:
    kinds: set[tuple[Dtype, Dtype]] = set()
    gaps: list[float] = []
    buffer = Buffer()
    with place.open(reader) as block:
        for rows in place.unit.pieces(family.dims, block.dtype.itemsize):
            name = place.unit.hf[rows.part]
            kinds.add((weights.tensors[name].dtype, block.dtype))
            hf = weights.read_rows(name, rows.first, rows.count, buffer)
            found = _gap(hf, weights.tensors[name].dtype, block.read(rows.count), block.dtype)
            if found is not None:
                gaps.append(found)
    with lock:
        result.num_tensors += len(place.unit.hf)
        result.cast |= {(one, other) for one, other in kinds if one != other}
        if gaps:
            worst = max(gaps, key=lambda gap: (math.isnan(gap), gap))
            result.different.update(dict.fromkeys(place.unit.hf, worst))


def _gap(hf: memoryview, hf_dtype: Dtype, megatron: memoryview, dtype: Dtype) -> float | None:
    """Largest difference after conversion to Megatron's dtype; None if the bits are the same."""
    if hf_dtype != dtype:
        hf = byte_view(tensor_of(hf, hf_dtype).to(dtype.torch))
    if same(hf, megatron):
        return None
    return float((tensor_of(hf, dtype).double() - tensor_of(megatron, dtype).double()).abs().max())


def compare_logits(hf_model: Path, megatron_checkpoint: Path) -> float:
    """Largest difference in float32 logits between transformers and megatron-core, on a fixed prompt.

    Both models are built whole, in memory; megatron-core takes the tensors under its own names, so this also
    tests what the names mean.

    Returns: max |difference|; at most `LOGITS_TOLERANCE` for the same model.
    Raises:  UserError: the embedded engine does not run this family.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    tokens = torch.tensor([[token % model.config.vocab_size for token in _PROMPT]])
    with torch.no_grad():
        expected = model(tokens).logits
        found = _megatron_logits(model.config, hf_config(hf_model), megatron_checkpoint, tokens)
    return float((expected - found).abs().max())


def _megatron_logits(
    transformers_config: object, config: dict[str, object], checkpoint: Path, tokens: torch.Tensor
) -> torch.Tensor:
    from nemo_grpo.engine.megatron import cpu, parallel
    from nemo_grpo.engine.megatron.model import build_model, transformer_config

    cpu.install()
    layout = parallel.Layout()
    parallel.initialize(layout, torch.device("cpu"), seed=0)
    try:
        model = build_model(
            transformers_config, transformer_config(transformers_config, layout, torch.float32)
        )
        full = read_megatron(config, checkpoint)
        for name, parameter in model.named_parameters():
            parameter.copy_(full.pop(name))
        if full:
            raise UserError(f"megatron-core has no place for {', '.join(sorted(full))}")
        return model(tokens, None, None).float()[..., : int(str(config["vocab_size"]))]
    finally:
        parallel.shut_down()


def read_megatron(config: dict[str, object], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint under its local-spec name, in memory."""
    family = family_for(config)
    reader = TorchDistReader(checkpoint)
    pieces: dict[str, list[torch.Tensor]] = {}
    for place in locate(family, reader):
        pieces.setdefault(place.unit.megatron, []).append(place.read(reader))
    reader.close()
    return {name: torch.cat(parts) for name, parts in pieces.items()}
