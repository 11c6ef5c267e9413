"""Builds a model's generator: the engine's decoder where it can, else transformers; alone or on all ranks."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from nemo_grpo.sampling.decoder.weights import missing_weights, unsupported
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.sampling.requests import Generator, Request, Rollout
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.hf_folder import load_config, weight_names

log = logging.getLogger(__name__)

LocalName = Literal["auto", "decoder", "hf"]


def choose(wanted: str, model: Path | PretrainedConfig) -> Literal["decoder", "hf"]:
    """Choose this model's generator; ``auto``: decoder where it can, else the log says why it cannot."""
    if wanted == "hf":
        return "hf"
    reason = _reason_against_decoder(model)
    if reason is None:
        return "decoder"
    if wanted == "decoder":
        raise UserError(f"generator=decoder cannot sample from this model: {reason}; use auto or hf")
    log.info("sampling with transformers (generator hf), the decoder does not take this model: %s", reason)
    return "hf"


def _reason_against_decoder(model: Path | PretrainedConfig) -> str | None:
    if isinstance(model, PretrainedConfig):
        return unsupported(model)
    try:
        config = load_config(model)
    except (OSError, ValueError) as error:  # transformers' own loading explains the error
        return first_line(error)
    missing = unsupported(config) is None and missing_weights(config, weight_names(model))
    return f"the folder has no {missing[0]} in a safetensors file" if missing else unsupported(config)


def build_local(
    wanted: str,
    model: Path | PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_batch_size: int,
) -> LocalGenerator:
    """Build the chosen generator with a folder's weights; of a configuration it has none yet.

    Args: wanted: a `LocalName`.
    """
    assert wanted in get_args(LocalName), wanted
    if choose(wanted, model) == "decoder":
        return DecoderGenerator(model, dtype, device, max_batch_size)
    from nemo_grpo.sampling.generate_hf import HFGenerator  # transformers' models take seconds to load

    return HFGenerator(model, dtype, device, max_batch_size)


class DistributedGenerator:
    """A `Generator` over those of all ranks: each samples some prompts, all get all responses.

    Every rank calls it with the same arguments; the result is the same for any number of ranks. Prompts go to
    the ranks in turn, equal prompts to one rank, since a generator tells their responses apart by counting.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.generator.update_weights(named_tensors)

    def generate(self, request: Request) -> Rollout:
        owners = _owners(request.prompts, dist.get_world_size())
        own = [index for index, owner in enumerate(owners) if owner == dist.get_rank()]
        rollout = self.generator.generate(request.select(own)) if own else None
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rollout)
        return _in_order([part for part in parts if part is not None], owners, request.num_generations)


def _owners(prompts: Sequence[list[int]], world_size: int) -> list[int]:
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(prompt), len(first)) % world_size for prompt in prompts]


def _in_order(parts: list[Rollout], owners: list[int], num_generations: int) -> Rollout:
    longest = max(part.tokens.shape[1] for part in parts)
    given = torch.tensor(owners).repeat_interleave(num_generations)
    rows = torch.cat([torch.nonzero(given == owner).flatten() for owner in sorted(set(owners))])
    merged = {}
    for field in fields(Rollout):
        columns = [getattr(part, field.name) for part in parts]
        if columns[0].dim() == 2:
            columns = [torch.nn.functional.pad(c, (0, longest - c.shape[1])) for c in columns]
        merged[field.name] = torch.cat(columns)[rows.argsort()]
    return Rollout(**merged)
