"""Ranks of a run: this process alone, or several that torch.distributed has joined."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def is_alone() -> bool:
    """True without process groups, or with one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def is_rank_zero() -> bool:
    """True on the process that logs and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if not is_alone():
        dist.barrier()


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is on any; every rank calls it at the same point."""
    if is_alone():
        return flag
    reduced = torch.tensor(int(flag), device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return bool(reduced)


def from_first_rank(work: Callable[[], Result]) -> Result:
    """Return the first rank's ``work()`` on every rank; the others do not call it.

    For results that may differ between two calls, such as a service's answers: the ranks must stay in step.

    Raises: whatever the first rank's call raises, on every rank.
    """
    if is_alone():
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
