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
    # Result and error travel together: a rank that waits for a result alone would wait forever for an error.
    result_and_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result_and_error[0] = work()
        except Exception as error:
            result_and_error[1] = error
    dist.broadcast_object_list(result_and_error, src=0)
    result, first_rank_error = result_and_error
    if first_rank_error is not None:
        raise first_rank_error
    return result
