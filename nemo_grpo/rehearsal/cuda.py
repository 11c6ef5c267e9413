"""Replaces torch.cuda and cuda devices by the CPU, and nccl by gloo, in a rehearsal's worker processes.

NeMo-RL, Megatron-Bridge and megatron-core name CUDA in hundreds of places, so torch itself is patched here,
whereas the embedded engine's `engine.megatron.cpu` patches only what megatron-core sees.
"""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nemo_grpo.support.fake_cuda import FACTORIES, Event, Stream, here, on_cpu

NEW = ["new_zeros", "new_empty", "new_full", "new_ones", "new_tensor"]
GROUPS = {"init_process_group": 0, "new_group": 2, "new_subgroups_by_enumeration": 2}
"""Functions that make process groups -> position of the backend's name among their arguments."""
SEES_CUDA = "megatron.bridge.training.initialize"
"""The only module for which CUDA is available: it asserts that and uses nothing else."""


class Properties:
    """The logical GPU's `torch.cuda.get_device_properties`."""

    name = "cpu"
    # Compute capability of an H100, for which NeMo-RL and megatron-core are made.
    major = 9
    minor = 0
    multi_processor_count = 1
    total_memory = 4 << 30


def after_megatron(_module: Any) -> None:
    """Undo megatron-core's change to tensor pickling, in processes that have imported it.

    megatron-core puts its own function into torch's pickles by name, so that reading a tensor pickled here
    would need megatron-core, which vLLM's environment does not have. `nemorl.workarounds.tensor_pickles` does
    the same for the driver alone, and keeps the upstream number and the test.
    """
    torch.storage._load_from_bytes = _load_from_bytes
    install()


def _load_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


# Pickles refer to a function by these names, and so to torch's, which every process has.
_load_from_bytes.__module__ = "torch.storage"
_load_from_bytes.__qualname__ = "_load_from_bytes"


def install() -> None:
    """Replace CUDA in this process, once."""
    if torch.cuda.is_available() or torch.cuda.Stream is Stream:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_queries()
    _answer_streams_and_generators()
    _move_nowhere()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in NEW:
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    for name, position in GROUPS.items():
        by_gloo = _with_gloo(getattr(c10d, name), position)
        for module in (dist, c10d):
            setattr(module, name, by_gloo)


def _nothing(value: Any = None) -> Callable[..., Any]:
    """Make a function without effect, a new one each time: torch._dynamo refuses one under two names."""
    return lambda *_, **__: value


def _answer_queries() -> None:
    """Replace torch.cuda's functions that ask for devices and memory, or wait for a device."""
    cuda: Any = torch.cuda
    state = {"device": 0}
    for name in (
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
        "init",
        "_lazy_init",
    ):
        setattr(cuda, name, _nothing())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _nothing(0))

    def set_device(device: Any) -> None:
        # The argument is a number, or a torch.device, whose index may be None.
        state["device"] = getattr(device, "index", device) or 0

    cuda.set_device = set_device
    cuda.current_device = lambda: state["device"]
    cuda.get_device_name = lambda *_: Properties.name
    cuda.get_device_properties = lambda *_: Properties()
    cuda.get_device_capability = lambda *_: (Properties.major, Properties.minor)
    cuda.mem_get_info = lambda *_: (Properties.total_memory // 2, Properties.total_memory)
    cuda.memory_stats = lambda *_: {}

    def is_asked_by_bridge() -> bool:
        # Frame 1 is the function of torch.cuda below, and frame 2 its caller.
        return sys._getframe(2).f_globals.get("__name__") == SEES_CUDA

    cuda.is_available = lambda: is_asked_by_bridge()
    cuda.device_count = lambda: int(is_asked_by_bridge())


def _answer_streams_and_generators() -> None:
    """Replace streams by one without effect, and CUDA's generator by the CPU's."""
    cuda: Any = torch.cuda
    only_stream = Stream()
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.set_stream = _nothing()
    cuda.current_stream = lambda *_: only_stream
    cuda.default_stream = lambda *_: only_stream
    cuda.stream = lambda stream: stream or only_stream
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    # Not torch.manual_seed, which itself calls manual_seed_all.
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = _nothing()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.profiler.start = _nothing()
    cuda.profiler.stop = _nothing()
    cuda.nvtx.range_push = _nothing()
    cuda.nvtx.range_pop = _nothing()
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _move_nowhere() -> None:
    """Make moves of tensors and modules to a GPU leave them on the CPU."""
    # Any, because mypy lets no method of a type be replaced.
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    stock_type = tensor.type
    for owner in (tensor, module):
        owner.to = _tohere(owner.to)
        owner.cuda = lambda self, *_, **__: self

    def type_of(self: Any, dtype: Any = None, **further: Any) -> Any:
        if dtype is not None:
            return stock_type(self, dtype, **further)
        # megatron-core compares the type's name with torch.cuda.FloatTensor and the like.
        return stock_type(self).replace("torch.", "torch.cuda.")

    tensor.type = type_of
    # Return a copy, as the real method does: NeMo-RL frees the original when it moves a policy off the GPU.
    tensor.pin_memory = lambda self, *_, **__: self.clone()


def _tohere(move: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``to`` that moves to the CPU where its caller names a GPU."""

    @functools.wraps(move)
    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = here(named["device"])
        if arguments:
            # The first argument may also be a dtype or a tensor, which `here` returns unchanged.
            arguments = (here(arguments[0]), *arguments[1:])
        return move(self, *arguments, **named)

    return to


def _with_gloo(make: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Make a function of `GROUPS` that makes the group with gloo where its caller names nccl."""

    def gloo(backend: Any) -> Any:
        return "gloo" if isinstance(backend, str) and "nccl" in backend else backend

    @functools.wraps(make)
    def make_group(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > position:
            backend = gloo(arguments[position])
            arguments = (*arguments[:position], backend, *arguments[position + 1 :])
        if "backend" in named:
            named["backend"] = gloo(named["backend"])
        # gloo refuses nccl's options, and has no GPU to which device_id could bind the group.
        if "pg_options" in named:
            named["pg_options"] = None
        named.pop("device_id", None)
        return make(*arguments, **named)

    return make_group
