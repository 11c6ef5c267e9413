"""Choice of a model's generator (our decoder, or else transformers), and sampling on all ranks together."""

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


def choose(requested: str, model: Path | PretrainedConfig) -> Literal["decoder", "hf"]:
    """Choose this model's generator.

    ``auto`` is the decoder where it knows the model; otherwise the log says why it does not.
    """
    if requested == "hf":
        return "hf"
    reason = _reason_against_decoder(model)
    if reason is None:
        return "decoder"
    if requested == "decoder":
        raise UserError(f"generator=decoder cannot sample from this model: {reason}; use auto or hf")
    log.info("sampling with transformers (generator hf), the decoder does not take this model: %s", reason)
    return "hf"


def _reason_against_decoder(model: Path | PretrainedConfig) -> str | None:
    if isinstance(model, PretrainedConfig):
        return unsupported(model)
    try:
        config = load_config(model)
    except (OSError, ValueError) as error:
        # Not raised here: with ``auto``, transformers loads the model, and its error explains more.
        return first_line(error)
    reason = unsupported(config)
    if reason is not None:
        return reason
    absent_weights = missing_weights(config, weight_names(model))
    if absent_weights:
        return f"the folder has no {absent_weights[0]} in a safetensors file"
    return None


def build_local(
    requested: str,
    model: Path | PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_batch_size: int,
) -> LocalGenerator:
    """Build the chosen generator, with weights if ``model`` is a folder.

    Args:
        requested: a `LocalName`.
        model: a folder or a configuration.
        dtype: dtype of the weights.
        device: device that samples.
        max_batch_size: largest number of responses that are sampled together.
    """
    assert requested in get_args(LocalName), requested
    if choose(requested, model) == "decoder":
        return DecoderGenerator(model, dtype, device, max_batch_size)
    # Imported here, because importing transformers' models takes seconds.
    from nemo_grpo.sampling.generate_hf import HFGenerator

    return HFGenerator(model, dtype, device, max_batch_size)


class DistributedGenerator:
    """A `Generator` over all ranks: each rank samples some of the prompts, and all ranks get all responses.

    Every rank must call it with the same arguments. The result is the same for any number of ranks. Prompts
    are dealt to the ranks in turn. Equal prompts go to one rank, because a generator counts repetitions of a
    prompt to give each its own random numbers.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.generator.update_weights(named_tensors)

    def generate(self, request: Request) -> Rollout:
        owners = _owners(request.prompts, dist.get_world_size())
        local_prompts = [index for index, owner in enumerate(owners) if owner == dist.get_rank()]
        rollout = None  # with fewer prompts than ranks, some ranks have none
        if local_prompts:
            rollout = self.generator.generate(request.select(local_prompts))
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rollout)
        rollouts = [part for part in parts if part is not None]
        return _in_order(rollouts, owners, request.num_generations)


def _owners(prompts: Sequence[list[int]], world_size: int) -> list[int]:
    """Return the rank that samples each prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        numbers.setdefault(tuple(prompt), len(numbers))
    return [numbers[tuple(prompt)] % world_size for prompt in prompts]


def _in_order(parts: list[Rollout], owners: list[int], num_generations: int) -> Rollout:
    """Join the rollouts of the ranks in the order of the prompts.

    Args:
        parts: rollouts of the ranks that have prompts, in the order of the ranks.
        owners: the rank of each prompt.
        num_generations: responses to each prompt.
    """
    longest = max(part.tokens.shape[1] for part in parts)
    owner_of_row = torch.tensor(owners).repeat_interleave(num_generations)
    # Row i of the joined rollouts answers row ``rows[i]`` of the request.
    rows = torch.cat([torch.nonzero(owner_of_row == owner).flatten() for owner in sorted(set(owners))])
    joined = {}
    for field in fields(Rollout):
        tensors = [getattr(part, field.name) for part in parts]
        if tensors[0].dim() == 2:
            tensors = [torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in tensors]
        joined[field.name] = torch.cat(tensors)[rows.argsort()]
    return Rollout(**joined)
