"""Replacements for CUDA's streams, events and devices, with which code for a GPU runs on a CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "triu",
    "zeros",
    "zeros_like",
)
"""Functions of torch that make a tensor on a given device."""


def here(device: Any) -> Any:
    """Return the CPU for a CUDA device or a GPU's number; return other values, such as a dtype, unchanged."""
    # `isinstance` would take a bool, which is an int, for the number of a GPU.
    is_gpu_number = type(device) is int
    is_cuda_device = isinstance(device, str | torch.device) and "cuda" in str(device)
    return CPU if is_gpu_number or is_cuda_device else device


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes tensors, so that it uses the CPU and ordinary instead of pinned memory."""

    @functools.wraps(factory)
    def factory_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = here(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return factory_on_cpu


def nothing(*_args: Any) -> None:
    """Replace a method that waits: on a CPU all work is finished when the call returns."""


class Event:
    """Replacement for torch.cuda.Event that reads the host's clock."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.record()

    def record(self, *_args: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    wait = synchronize = nothing

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Stream:
    """Replacement for torch.cuda.Stream: a CPU's work is finished when the call returns."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = __exit__ = nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self
