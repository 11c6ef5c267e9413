"""Transformer Engine on a CPU: its own Python code, over kernels written in torch (`te_fp8`, `te_attention`).

`install` makes ``import transformer_engine`` work in this process without CUDA. What runs then are
Transformer Engine's modules, FP8 recipes and autograd functions as released, and megatron-core's layers built
of them; what a GPU would compute for them is computed with torch, in the same formats.
"""

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import te_attention
import te_fp8
import torch
from torch import Tensor

FOLDER = Path(sys.prefix) / "transformer_engine"
"""Where ``make venv`` puts Transformer Engine's Python code, out of the way of ``import``."""

_ABSENT = (
    "pytorch.onnx_extensions",
    "pytorch.triton",
    "pytorch.attention.inference",
    *(f"pytorch.triton.{name}" for name in ("pad", "permutation", "cross_entropy")),
)
"""Modules that need packages for other uses."""

_RING = "attention.dot_product_attention.context_parallel"

_NAMED = ("layernorm_fwd", "layernorm_bwd", "rmsnorm_bwd_add")
"""Kernels that are looked up, but not called."""

FP8FwdTensors = IntEnum(
    "FP8FwdTensors", [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")], start=0
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")], start=0
)


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    x = input.detach().float()
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    gamma = weight.detach().float() + zero_centered_gamma
    found = (x * rsigma[..., None] * gamma).to(te_fp8.TORCH[otype])
    if quantizer is not None:
        return [te_fp8.quantize(found, quantizer, ln_out), None, rsigma.flatten()]
    return [found if ln_out is None else ln_out.copy_(found), None, rsigma.flatten()]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    grad, width = dz.float(), x.shape[-1]
    scale = rsigma.reshape(*x.shape[:-1], 1)
    normed = x.float() * scale
    d_normed = grad * (gamma.detach().float() + zero_centered_gamma)
    dx = scale * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (grad * normed).reshape(-1, width).sum(0).to(gamma.dtype)]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step on lists of gradients, parameters, both moments and, if there are, main parameters."""
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for grad, parameter, m, v, *main in zip(*tensor_lists, strict=True):
        p, g = (main[0] if main else parameter).float(), grad.float()
        if mode == 0:
            g = g + weight_decay * p
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        update = (m / first) / ((v / second).sqrt() + epsilon)
        if mode == 1:
            update += weight_decay * p
        p = p - lr * update
        for target in (parameter, *main):
            target.copy_(p)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([x.float().norm() for x in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not bool(source.isfinite().all()):
            noop_flag.fill_(1)


class _NotHere:
    """A kernel or class of the extension that nothing here should reach."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise te_fp8.Refused(f"{type(self).__name__} is not written for the CPU")


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_NotHere,), {})


def _absent(name: str) -> types.ModuleType:
    """A module that nothing here should use; its names can be imported."""
    made = types.ModuleType(name)
    made.__getattr__ = _missing  # type: ignore[method-assign]
    return made


def _extension() -> types.ModuleType:
    made = types.ModuleType("transformer_engine_torch")
    for source in (te_fp8, te_attention, sys.modules[__name__]):
        for name, value in vars(source).items():
            public = not name.startswith("_") and getattr(value, "__module__", None) in (
                source.__name__,
                "enum",
            )
            if public or (isinstance(value, type) and issubclass(value, IntEnum)):
                setattr(made, name, value)
    made.get_num_cublas_streams = lambda: 4  # type: ignore[attr-defined]
    made.get_cublasLt_version = lambda: 130000  # type: ignore[attr-defined]
    made.get_cudnn_version = lambda: 91600  # type: ignore[attr-defined]

    for name in _NAMED:
        setattr(made, name, _missing(name))
    made.__getattr__ = _missing  # type: ignore[method-assign]
    return made


def install() -> None:
    """Call once, before megatron-core is imported.

    Raises: FileNotFoundError: Transformer Engine's Python code is not in `FOLDER`.
    """
    if not (FOLDER / "transformer_engine" / "pytorch").is_dir():
        raise FileNotFoundError(FOLDER)
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    sys.path.insert(0, str(FOLDER))
    sys.modules["transformer_engine_torch"] = _extension()
    for name in _ABSENT:
        sys.modules[f"transformer_engine.{name}"] = _absent(name)
    cpu = _stand_ins()
    vars(torch.cuda).update(_cuda(cpu))
    import transformer_engine.common as common

    common.load_framework_extension = lambda _framework: None
    import transformer_engine.pytorch as te

    _give_torch_for_cpu(cpu)
    parts = {name: sys.modules[f"{te.__name__}.{name}"] for name in ("distributed", "module.base", _RING)}
    parts["distributed"]._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    parts["distributed"]._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    parts[_RING].flash_attn_p2p_communicate = _exchange
    base = parts["module.base"].TransformerEngineBaseModule
    for owner, name in ((te.DotProductAttention, "forward"), (base, "prepare_forward")):
        setattr(owner, name, _as_cuda(getattr(owner, name)))


def _give_torch_for_cpu(cpu: types.ModuleType) -> None:
    """To every module of Transformer Engine's."""
    torch_for_cpu = cpu._torch_for_cpu()
    there = cpu._StandIn(torch_for_cpu.cuda, {"is_available": lambda: True})
    version = cpu._StandIn(torch.version, {"cuda": "13.0"})
    distributed = cpu._StandIn(torch.distributed, {"_coalescing_manager": _one_by_one})
    stand_in = cpu._StandIn(torch_for_cpu, {"cuda": there, "version": version, "distributed": distributed})
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
        if name.startswith("transformer_engine") and hasattr(module, "_empty_tensor"):
            module._empty_tensor = torch.Tensor  # type: ignore[attr-defined]


def _as_cuda(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For the time of the call every tensor says that it is on a GPU."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True, create=True):
            return forward(*args, **kwargs)

    return wrapped


@contextmanager
def _one_by_one(**_unused: Any) -> Iterator[Any]:
    """Collectives that NCCL would run together; gloo cannot."""
    yield SimpleNamespace(wait=lambda: None)


def _exchange(
    rank: int, send: Tensor, send_to: int, receive: Tensor, receive_from: int, group: Any, batched: bool
) -> list[Any]:
    """A step of context parallelism's ring, by a collective: gloo's isend and irecv wait forever here."""
    ranks = torch.distributed.get_process_group_ranks(group)
    sent = [torch.empty_like(send) for _ in ranks]
    torch.distributed.all_gather(sent, send.contiguous(), group=group)
    receive.copy_(sent[ranks.index(receive_from)])
    return []


def _stand_ins() -> types.ModuleType:
    """The engine's `megatron.cpu`, without its package: that imports megatron-core."""
    path = Path(__file__).parents[2] / "nemo_grpo/engine/megatron/cpu.py"
    spec = importlib.util.spec_from_file_location("stand_ins_for_transformer_engine", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _cuda(cpu: types.ModuleType) -> dict[str, Any]:
    """What Transformer Engine asks of torch.cuda: an H100, whose only stream is the CPU's."""
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="a GPU that is not there")
    for_cpu = vars(cpu._cuda_for_cpu())
    names = ("current_device", "current_stream", "stream", "is_current_stream_capturing")
    return {
        **{name: for_cpu[name] for name in names},
        "Stream": cpu.Stream,
        "Event": cpu.Event,
        "get_device_properties": lambda _device=None: hopper,
        "get_device_capability": lambda _device=None: (9, 0),
    }
