"""Run a function on several ranks, each a process of its own, and collect what they return.

The processes come from a fork server that has imported the heavy modules once, so a rank starts in a fraction
of a second, with nothing of the test process's state (threads, process groups).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

import pytest

from nemo_grpo.ports import reserved_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["nemo_grpo.engine.trainer", "transformers.activations", "pytest"])
TIMEOUT = 240


def slow_but(cases: Iterable[str], *quick: str) -> list[Any]:
    """Parameters for a test: ``quick`` run always, the others with the tests marked slow."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on each rank; the results in rank order. Raises if any rank raised."""
    with reserved_port() as port:
        return _run(world_size, port, function, arguments)


def _run(world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _context.Process(target=_rank, args=(rank, world_size, port, pipes[rank][1], function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for rank, (receive, _) in enumerate(pipes):
            wait([receive, processes[rank].sentinel], TIMEOUT)
            assert receive.poll(), f"rank {rank} ended without an answer, or gave none within {TIMEOUT} s"
            error, result = pickle.loads(receive.recv_bytes())
            assert error is None, f"rank {rank}:\n{error}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for ends in pipes:
            for end in ends:
                end.close()


def _rank(
    rank: int, world_size: int, port: int, send: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        answer = (None, function(*arguments))
    except BaseException:
        answer = (traceback.format_exc(), None)
    send.send_bytes(pickle.dumps(answer))  # by value: torch would share memory that ends with this process
    os._exit(0)  # no waiting for peers that may have failed
