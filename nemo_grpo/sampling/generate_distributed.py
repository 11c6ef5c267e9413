"""Share generation between the ranks: each samples some of the prompts, all get all responses."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_grpo.sampling.requests import Generator, Request, Rollout


class DistributedGenerator:
    """A `Generator` over the generators of all ranks. The result is the same for any number of ranks.

    Every rank calls it with the same arguments. Prompts go to the ranks in turn, equal prompts to one rank,
    because a generator tells their responses apart by counting.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `Generator.update_weights`."""
        self.generator.update_weights(named_tensors)

    def generate(self, request: Request) -> Rollout:
        """See `Generator.generate`."""
        owners = _owners(request.prompts, dist.get_world_size())
        own = [index for index, owner in enumerate(owners) if owner == dist.get_rank()]
        rollout = self.generator.generate(request.select(own)) if own else None
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rollout)
        return _in_order([part for part in parts if part is not None], owners, request.num_generations)


def _owners(prompts: Sequence[list[int]], world_size: int) -> list[int]:
    """The rank of each prompt; equal prompts have the same one."""
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(prompt), len(first)) % world_size for prompt in prompts]


def _in_order(parts: list[Rollout], owners: list[int], num_generations: int) -> Rollout:
    """One rollout, rows in the order of the prompts."""
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
