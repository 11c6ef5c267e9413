"""Patches that let megatron-core run on CPU and gloo.

megatron-core's arithmetic runs anywhere; what stops it on a CPU is some forty calls such as
``torch.cuda.current_device()`` and ``device="cuda"``. `install` gives every ``megatron.core`` module a
stand-in for the name ``torch`` that answers those calls with the CPU and passes everything else on. torch
itself is not changed, other packages see nothing, and where CUDA is available `install` does nothing at all.

The complete list of what is replaced:
- the global ``torch`` of each imported ``megatron.core.*`` module (`_torch_for_cpu`);
- ``tensor_parallel.random._set_cuda_rng_state``, which goes through torch's C interface;
- `_AS_CUDA`: functions that test ``Tensor.type() == 'torch.cuda...'`` or call ``Tensor.cuda()``; for the time
  of the call tensors answer as CUDA tensors would.

megatron-core 0.16 to 0.19 need all of it; tests/unit/engine/test_upstream_faults.py fails when the oldest
supported version no longer needs one of the functions.
"""

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.fake_cuda import CPU, FACTORIES, Event, Stream, on_cpu

TESTED_VERSIONS = ((0, 16), (0, 20))
"""First and last minor version of megatron-core that this module was run with."""

MODULES = (
    "distributed",
    "models.gpt.gpt_layer_specs",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "pipeline_parallel.schedules",
    "tensor_parallel.random",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
)
"""Modules that the engine uses; they and all that they import get the stand-in."""

_AS_CUDA = (
    ("optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
    ("models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
    ("models.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank"),
)
"""(module, function): functions of megatron-core that test whether a tensor is on a GPU."""


def install() -> bool:
    """Make megatron-core usable without CUDA. Call it before anything of megatron-core is built.

    Returns:
        True if the stand-ins are active, False if CUDA is available, so that nothing was changed.
    """
    if torch.cuda.is_available():
        return False
    _check_version()
    for name in MODULES:
        importlib.import_module(f"megatron.core.{name}")
    patch_imported_modules()
    _replace_rng_setter()
    for module, attribute in _AS_CUDA:
        _wrap_as_cuda(importlib.import_module(f"megatron.core.{module}"), attribute)
    return True


def patch_imported_modules() -> None:
    """Give the stand-in to modules of megatron-core that were imported after `install`."""
    # The list is a copy, because `getattr` on a module may import further modules.
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _torch_for_cpu()  # type: ignore[attr-defined]


def _check_version() -> None:
    import megatron.core

    version = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    first, last = TESTED_VERSIONS
    if not first <= version <= last:
        raise UserError(
            f"megatron-core {megatron.core.__version__} is outside the tested range "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}; install the one of requirements/constraints.txt"
        )


class _StandIn(types.ModuleType):
    """A module that replaces some names of another module and passes the rest on."""

    def __init__(self, base: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


@functools.cache
def _torch_for_cpu() -> types.ModuleType:
    factories = {name: on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _StandIn(torch, {"cuda": _cuda_for_cpu(), **factories})


def _cuda_for_cpu() -> types.ModuleType:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def zero(*_args: Any, **_kwargs: Any) -> int:
        return 0

    rng: dict[str, Any] = {
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    nvtx = types.SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *_a: nullcontext())
    replaced: dict[str, Any] = {
        **rng,
        "random": _StandIn(torch.cuda.random, rng),
        "current_device": lambda: CPU,
        "synchronize": nothing,
        "empty_cache": nothing,
        "nvtx": nvtx,
        "Event": Event,
        **dict.fromkeys(("Stream", "stream", "current_stream", "default_stream"), Stream),
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), zero),
    }
    return _StandIn(torch.cuda, replaced)


@contextmanager
def _tensors_answer_as_cuda() -> Iterator[None]:
    """Make ``Tensor.type()`` name CUDA types and ``Tensor.cuda()`` return the tensor within the block."""
    # As Any, because mypy does not accept a replaced method of a class.
    tensor: Any = torch.Tensor
    type_of = tensor.type

    def as_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.")
        return type_of(self, dtype, *args, **kwargs)

    tensor.type = as_cuda
    tensor.cuda = lambda self, *_args, **_kwargs: self
    try:
        yield
    finally:
        # Both methods live on the base class, so deleting the replacements brings them back.
        del tensor.type, tensor.cuda


def _wrap_as_cuda(module: types.ModuleType, attribute: str) -> None:
    """Replace a function of megatron-core by one within which tensors answer as CUDA tensors."""
    *owner_names, name = attribute.split(".")
    owner = functools.reduce(getattr, owner_names, module)
    original = getattr(owner, name)
    if getattr(original, "_answers_as_cuda", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Such functions may call each other. Only the outermost call replaces and restores the methods.
        if "type" in torch.Tensor.__dict__:
            return original(*args, **kwargs)
        with _tensors_answer_as_cuda():
            return original(*args, **kwargs)

    wrapped._answers_as_cuda = True  # type: ignore[attr-defined]
    if owner_names:
        setattr(owner, name, wrapped)
        return
    # Other modules may have imported a plain function by name, so each reference to it is replaced.
    for importer in list(sys.modules.values()):
        is_megatron = getattr(importer, "__name__", "").startswith("megatron.core")
        if is_megatron and getattr(importer, name, None) is original:
            setattr(importer, name, wrapped)


def _replace_rng_setter() -> None:
    from megatron.core.tensor_parallel import random

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._set_cuda_rng_state = set_state
