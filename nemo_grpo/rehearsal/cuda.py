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

    name, major, minor, multi_processor_count = "cpu", 9, 0, 1
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


_load_from_bytes.__module__, _load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"


def install() -> None:
    """Replace CUDA in this process, once."""
    if torch.cuda.is_available() or torch.cuda.Stream is Stream:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_queries()
    _answer_streams_and_generators()
    _move_nowhere()
    for owner, names in ((torch, FACTORIES), (torch.Tensor, NEW)):
        for name in names:
            setattr(owner, name, on_cpu(getattr(owner, name)))
    for name, position in GROUPS.items():
        by_gloo = _with_gloo(getattr(c10d, name), position)
        for module in (dist, c10d):
            setattr(module, name, by_gloo)


def _nothing(value: Any = None) -> Callable[..., Any]:
    """Make a function without effect, a new one each time: torch._dynamo refuses one under two names."""
    return lambda *_, **__: value


def _answer_queries() -> None:
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
    cuda.set_device = lambda device: state.update(device=getattr(device, "index", device) or 0)
    cuda.current_device = lambda: state["device"]
    cuda.get_device_name = lambda *_: Properties.name
    cuda.get_device_properties = lambda *_: Properties()
    cuda.get_device_capability = lambda *_: (Properties.major, Properties.minor)
    cuda.mem_get_info = lambda *_: (Properties.total_memory // 2, Properties.total_memory)
    cuda.memory_stats = lambda *_: {}
    cuda.is_available = lambda: sys._getframe(1).f_globals.get("__name__") == SEES_CUDA
    cuda.device_count = lambda: int(sys._getframe(1).f_globals.get("__name__") == SEES_CUDA)


def _answer_streams_and_generators() -> None:
    cuda: Any = torch.cuda
    stream = Stream()
    cuda.Stream, cuda.Event, cuda.set_stream = Stream, Event, _nothing()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda given: given or stream
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.manual_seed = torch.default_generator.manual_seed  # torch.manual_seed itself calls manual_seed_all
    cuda.manual_seed_all = _nothing()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.profiler.start, cuda.profiler.stop = _nothing(), _nothing()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _move_nowhere() -> None:
    tensor: Any = torch.Tensor  # not its type, which lets no method be replaced
    module: Any = torch.nn.Module
    kind = tensor.type
    for owner in (tensor, module):
        owner.to = _tohere(owner.to)
        owner.cuda = lambda self, *_, **__: self

    def type_of(self: Any, dtype: Any = None, **further: Any) -> Any:  # asked for torch.cuda.FloatTensor
        return kind(self).replace("torch.", "torch.cuda.") if dtype is None else kind(self, dtype, **further)

    tensor.type = type_of
    # A copy, as pinned memory is one: NeMo-RL frees the original when it moves a policy off the GPU.
    tensor.pin_memory = lambda self, *_, **__: self.clone()


def _tohere(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = here(named["device"])
        return move(self, *map(here, arguments[:1]), *arguments[1:], **named)

    return to


def _with_gloo(make: Callable[..., Any], position: int) -> Callable[..., Any]:
    def gloo(backend: Any) -> Any:
        return "gloo" if isinstance(backend, str) and "nccl" in backend else backend

    @functools.wraps(make)
    def call(*given: Any, **named: Any) -> Any:
        arguments = [gloo(a) if at == position else a for at, a in enumerate(given)]
        if "backend" in named:
            named["backend"] = gloo(named["backend"])
        if "pg_options" in named:
            named["pg_options"] = None
        named.pop("device_id", None)
        return make(*arguments, **named)

    return call
