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
    """Return True on every rank if the flag is true on any rank. All ranks must call it at the same point."""
    if is_alone():
        return flag
    reduced = torch.tensor(int(flag), device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return bool(reduced)


def from_first_rank(work: Callable[[], Result]) -> Result:
    """Call a function on the first rank alone, and return its result on every rank.

    Ranks must stay in step, so all of them need the same result where two calls may differ, as with a
    service's answers.

    Raises: on every rank, the error that the function raises on the first rank.
    """
    if is_alone():
        return work()
    # Result and error travel together. Otherwise the other ranks would wait forever for a result if the
    # first rank ended with an error.
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
