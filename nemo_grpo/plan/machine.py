"""This machine's CPU as hardware: what it computes and moves, measured within about two seconds.

Every rate is the best of several short trials, by the thread's own CPU seconds where there is one thread, so
that other work on the machine hardly shows.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
from math import log
from typing import TYPE_CHECKING

from nemo_grpo.errors import UserError
from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.setup import Setup

if TYPE_CHECKING:
    import torch

    from nemo_grpo.recipe import Recipe
    from nemo_grpo.sampling.decoder.matrices import Matrix

ROWS = (1, 8, 32, 128)
"""Rows of the products that decoding makes; training's have `TRAINING_FLOPS`, or a microbatch's tokens."""
TRAINING_FLOPS = 4e9
CACHED_BYTES = 64 * 2**20
"""Weights and arrays that are measured take more than the caches of a CPU hold."""
TRIAL_SECONDS = 0.06


@dataclass(frozen=True)
class Machine:
    """One rank of the embedded engine on a CPU.

    Attributes: forward: (rows, FLOP/s) of a layer's matrix products, ascending rows.
                sampling: the same with the decoder's weights, which may be packed (`sampling.decoder`).
                backward: FLOP/s of both products of the backward pass.
                memory: bytes/s that an operation on large arrays reads and writes.
                attention: FLOP/s of training's attention.
                cache: bytes/s of keys and values while decoding.
                operation: seconds of an operation on a few numbers.
    """

    memory_bytes: float
    forward: tuple[tuple[int, float], ...]
    sampling: tuple[tuple[int, float], ...]
    backward: float
    memory: float
    attention: float
    cache: float
    operation: float

    def rate(self, rows: float, *, sampling: bool = False) -> float:
        """FLOP/s of products with so many rows: linear in the logarithm of rows between those measured."""
        measured = self.sampling if sampling else self.forward
        place = bisect_left(measured, (rows, 0.0))
        if place in (0, len(measured)):
            return measured[min(place, len(measured) - 1)][1]
        (low, slow), (high, fast) = measured[place - 1 : place + 1]
        return slow + (fast - slow) * log(rows / low) / log(high / low)

    def as_hardware(self) -> Hardware:
        """For the memory's rules; nothing else of a GPU is known."""
        flops, moved = self.forward[-1][1], self.memory
        return Hardware(self.memory_bytes, flops, flops, moved, moved, moved, moved)


def measure_for(recipe: Recipe, shape: ModelSpec, setup: Setup) -> Machine:
    """This CPU as the embedded engine would use it for a recipe.

    Raises: UserError: what is not predicted: the cluster, several ranks, models that the engine's own decoder
            does not take.
    """
    name = recipe.nemo_grpo.run_name
    if not setup.embedded:
        raise UserError(
            f"--gpu this: {name} has nemo_grpo.target=cluster, and this machine's CPU runs the embedded "
            "engine; name the cluster's GPU, such as --gpu h100"
        )
    if recipe.world_size > 1:
        raise UserError(
            f"--gpu this: one rank is predicted, and {name} has {recipe.world_size}; use "
            "cluster.gpus_per_node=1 with layouts of 1"
        )
    if shape.num_experts or shape.num_vision_parameters or recipe.nemo_grpo.engine.generator == "hf":
        raise UserError(
            f"--gpu this: {shape.name} is not sampled by the engine's own decoder, the only one that is "
            "predicted; use a dense text model and nemo_grpo.engine.generator=auto"
        )
    threads = recipe.nemo_grpo.engine.num_threads
    return measure(shape, setup.train_tokens, num_threads=threads, num_bytes=setup.precision_bytes)


def total_memory() -> float:
    """Bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measure(shape: ModelSpec, tokens: int, *, num_threads: int = 1, num_bytes: int = 4) -> Machine:
    """Measure this CPU at the sizes of one model.

    Args: tokens: of a microbatch.  num_bytes: of a parameter, 4 is FP32 and 2 BF16.
    """
    import torch

    dtype = torch.float32 if num_bytes == 4 else torch.bfloat16
    with _threads(num_threads), torch.inference_mode():
        best = _Best(time.thread_time if num_threads == 1 else time.perf_counter)
        layers = _layers(shape, dtype)
        size = sum(matrix.weight.numel() for matrix in layers[0])
        rows = sorted({*ROWS, max(min(tokens, int(TRAINING_FLOPS / (2 * size))), ROWS[-1])})
        forward = tuple((n, 2 * n * size / best(_forward(layers, n))) for n in rows)
        for matrix in chain.from_iterable(layers):
            matrix.pack()
        packed = any(matrix.is_packed for matrix in layers[0])
        sampling = tuple((n, 2 * n * size / best(_forward(layers, n))) for n in rows) if packed else forward
        return Machine(
            memory_bytes=total_memory(),
            forward=forward,
            sampling=sampling,
            backward=4 * rows[-1] * size / best(_backward(layers, rows[-1])),
            memory=_bandwidth(best),
            attention=_attention(shape, best),
            cache=_cache(shape, dtype, best),
            operation=_operation(best),
        )


class _Best:
    """Shortest seconds of a call, over trials of `TRIAL_SECONDS` in all, at least two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        found: list[float] = []
        while len(found) < 2 or sum(found) < TRIAL_SECONDS:
            start = self.clock()
            call()
            found.append(max(self.clock() - start, 1e-9))
        return min(found)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layers(shape: ModelSpec, dtype: torch.dtype) -> list[list[Matrix]]:
    """The matrices [out, in] of as many layers as exceed the CPU's caches, or of all; none is packed."""
    import torch

    from nemo_grpo.sampling.decoder.matrices import Matrix

    h, f, q = shape.hidden_size, shape.ffn_size, shape.query_size
    sizes = ((q + 2 * shape.key_value_size, h), (h, q), (2 * f, h), (h, f))
    width = sum(out * into for out, into in sizes) * dtype.itemsize
    number = min(max(int(CACHED_BYTES / width), 1), shape.num_layers)
    return [[Matrix(torch.ones(size, dtype=dtype), shared=True) for size in sizes] for _ in range(number)]


def _forward(layers: list[list[Matrix]], rows: int) -> Callable[[], None]:
    """One layer's products at a time, the next layer's at the next call."""
    inputs = [matrix.weight.new_ones(rows, matrix.weight.shape[1]) for matrix in layers[0]]
    turn = cycle(layers)

    def call() -> None:
        for x, matrix in zip(inputs, next(turn), strict=True):
            matrix(x)

    return call


def _backward(layers: list[list[Matrix]], rows: int) -> Callable[[], None]:
    """The gradients of inputs and weights."""
    weights = [matrix.weight for matrix in layers[0]]
    pairs = [tuple(weight.new_ones(rows, size) for size in weight.shape) for weight in weights]

    def call() -> None:
        for (gradient, x), weight in zip(pairs, weights, strict=True):
            gradient @ weight
            gradient.T @ x

    return call


def _bandwidth(best: _Best) -> float:
    """Bytes a second of the sum of two arrays that no cache holds, into a third."""
    import torch

    a, b, c = (torch.ones(CACHED_BYTES // 8) for _ in range(3))
    return 3 * a.nbytes / best(lambda: torch.add(a, b, out=c))


def _attention(shape: ModelSpec, best: _Best) -> float:
    """Rate of a group's responses' attention to their prompt and themselves, with packing's bias; in FP32."""
    import torch

    rows, own, columns = 8, 64, 128
    heads, groups, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    queries = torch.ones(rows, heads, own, width)
    keys = torch.ones(rows, groups, columns, width)
    bias = torch.zeros(rows, 1, own, columns)
    attend = torch.nn.functional.scaled_dot_product_attention
    flops = 4 * rows * heads * own * columns * width
    return flops / best(lambda: attend(queries, keys, keys, bias, enable_gqa=True))


def _cache(shape: ModelSpec, dtype: torch.dtype, best: _Best) -> float:
    """Rate of a decoding step's attention to the keys and values of many responses."""
    import torch

    groups, width, columns = shape.num_key_value_heads, shape.head_dim, 128
    rows = max(CACHED_BYTES // (2 * groups * width * columns * dtype.itemsize), 1)
    queries = torch.ones(rows, groups, shape.num_attention_heads // groups, width, dtype=dtype)
    values = torch.ones(rows, groups, columns, width, dtype=dtype)
    if dtype == torch.float32:  # as `sampling.decoder.cache` does
        keys = torch.ones(rows * groups, width, columns)
        q, v = queries.flatten(0, 1), values.flatten(0, 1)
        seconds = best(lambda: torch.bmm(torch.bmm(q, keys).softmax(-1), v))
    else:
        keys, attend = values.clone(), torch.nn.functional.scaled_dot_product_attention
        seconds = best(lambda: attend(queries, keys, values))
    return 2 * values.nbytes / seconds


def _operation(best: _Best) -> float:
    import torch

    few, number = torch.ones(8), 200

    def call() -> None:
        for _ in range(number):
            few + 1.0

    return best(call) / number
