"""Run a function on several ranks, each a process of its own, and collect what they return.

Ranks are forks of a server, and that is a fork of the test process from before the first test: they start in
a tenth of a second, with all that the tests import and nothing that a test did (threads, process groups).
"""

import atexit
import importlib
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from functools import partial
from multiprocessing.connection import wait

import pytest
import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - before the server starts: it takes a second

from nemo_grpo.engine.launch import reserved_port
from nemo_grpo.engine.megatron import cpu

_context = multiprocessing.get_context("fork")
_server = None
TIMEOUT = 480


def start_server():
    """Once the tests are collected and none has run."""
    global _server
    if _server is not None:
        return
    for name in cpu.MODULES:
        importlib.import_module(f"megatron.core.{name}")
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(here, there))
    atexit.register(here.close)  # the server's end, for which multiprocessing waits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # xdist has a thread
        process.start()
    there.close()
    _server = here


def _serve(theirs, requests):
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process ends this one
    while True:
        try:
            job = requests.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (None, _run(*job))
        except BaseException as error:
            answer = (error, None)
        requests.send_bytes(pickle.dumps(answer))


def slow_but(cases, *quick):
    """Parameters for a test: ``quick`` run always, the others with the tests marked slow."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


def run_ranks(world_size, function, *arguments, **named):
    """What the function returns on each rank, in rank order. Raises if any rank raised."""
    start_server()
    with reserved_port() as port:
        _server.send((world_size, port, partial(function, *arguments, **named)))
        error, results = pickle.loads(_server.recv_bytes())
    if error is not None:
        raise error
    return results


def _run(world_size, port, function):
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _context.Process(target=_rank, args=(rank, world_size, port, pipes[rank][1], function))
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


def _rank(rank, world_size, port, send, function):
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        answer = (None, function())
    except BaseException:
        answer = (traceback.format_exc(), None)
    send.send_bytes(pickle.dumps(answer))  # by value: torch would share memory that ends with this process
    os._exit(0)  # no waiting for peers that may have failed
