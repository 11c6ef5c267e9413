"""A CUDA device that is not there, in a process of its own.

Tensors on the CPU are real. A tensor on "cuda" has a shape, a dtype and a device, and no numbers: torch's
FakeTensorMode says what comes of it. Devices that a GPU would not let mix raise here too, and so does what
cannot go on without the numbers (nonzero, unique, indexing by a mask). What would make the host wait for a
GPU goes on with ones for numbers, and is recorded:

    read     a number or a tensor is copied to the host
    upload   a tensor is copied from the host's pageable memory, a CPU tensor used as an index among them
    sync     the host waits for all of the device
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from processes import PATIENCE, ROOT
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_aten = torch.ops.aten
_MAY_UPLOAD = {
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
}


class FakeCuda(TorchDispatchMode):
    """Within the block "cuda" is a device of this process.

    Attributes: waits: (kind, "file:function" of ours) in the order in which they happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode()
        self.waits: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation: for real on the CPU, or in shapes on the GPU."""
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        on_gpu, target = any(map(_is_fake, tensors)), kwargs.get("device")
        to_cpu = target is not None and torch.device(target).type == "cpu"
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, all(map(_is_fake, tensors)))
        if not on_gpu and (target is None or torch.device(target).type != "cuda"):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.namespace == "aten":  # composed ones come as they are
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0]).item()
        if func is _aten._to_copy.default and on_gpu and to_cpu:
            return self._read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and _is_fake(args[1]) and not _is_fake(args[0]):
            return args[0].copy_(self._read(args[1]))
        if (on_gpu and any(not _is_fake(x) and x.dim() for x in tensors)) or (
            func is _aten._to_copy.default and not on_gpu
        ):
            if func not in _MAY_UPLOAD:
                devices = [f"{x.device} {list(x.shape)}" for x in tensors]
                raise RuntimeError(f"{func} mixes devices: {', '.join(devices)}")
            source = tensors[-1]
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)) or not hasattr(source, "pinned"):
                self.record("upload")
        if func._schema.is_mutable and hasattr(args[0], "known"):
            del args[0].known
        uploaded = args[0].clone() if func is _aten._to_copy.default and not on_gpu else None
        args, kwargs = tree_map(self._faked, (args, kwargs))
        with self.fakes:
            result = func(*args, **kwargs)
        if uploaded is not None:
            result.known = uploaded
        return result

    def _read(self, x: Any) -> torch.Tensor:
        """Ones, unless the tensor is as it was uploaded."""
        self.record("read")
        return x.known.clone() if hasattr(x, "known") else torch.ones(x.shape, dtype=x.dtype)

    def _communicate(self, func: Any, args: Any, kwargs: Any, on_gpu: bool) -> Any:
        """A collective: nothing comes from anywhere, and nothing is waited for."""
        if (
            not on_gpu
            and "barrier" not in str(func)
            and "object" not in "".join(frame.name for frame in traceback.extract_stack())
        ):
            raise RuntimeError(f"{func} of a CPU tensor, which NCCL does not have")
        real = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype) if _is_fake(x) else x, (args, kwargs))
        result = func(*real[0], **real[1])
        return (args[0], result[-1]) if isinstance(result, tuple) else result

    def _faked(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or _is_fake(x):
            return x
        return self.fakes.from_tensor(x.detach(), static_shapes=True)

    def taken(self) -> dict[str, int]:
        """How often each wait happened since the last call, as "kind file:function"."""
        return dict(Counter(" ".join(wait) for wait in self.taken_in_order()))

    def taken_in_order(self) -> list[tuple[str, str]]:
        """The waits since the last call."""
        found, self.waits = self.waits, []
        return found

    def record(self, kind: str) -> None:
        """Note a wait, at the innermost line of this repository."""
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / "nemo_grpo"):
                self.waits.append((kind, f"{path.relative_to(ROOT)}:{frame.name}"))
                return
        self.waits.append((kind, "elsewhere"))


class _InFrontOfTorch(TorchFunctionMode):
    """What torch does before a dispatch mode sees it: a device given as a number, tensors made of tensors."""

    def __init__(self, mode: FakeCuda) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if func in (torch.autograd.backward, torch.Tensor.backward):
            with self:  # torch's own would leave this mode for the time
                return _backward(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return _pinned(args[0].clone())
        if func is torch.Tensor.is_pinned:
            return hasattr(args[0], "pinned")
        if func is torch.tensor and isinstance(args[0], list):
            args = (tree_map(lambda x: x.item() if _is_fake(x) else x, args[0]), *args[1:])
        if kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs))
        return func(*args, **kwargs)


def _backward(tensors: Any, grad_tensors: Any = None, **_unused: Any) -> None:
    roots = tensors if isinstance(tensors, tuple | list) else (tensors,)
    seeds = grad_tensors if isinstance(grad_tensors, tuple | list) else (grad_tensors,) * len(roots)
    seeds = [torch.ones_like(x) if seed is None else seed for x, seed in zip(roots, seeds, strict=True)]
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _generator(_device: Any = None) -> torch.Generator:
    return torch._C.Generator()


def _pinned(x: torch.Tensor) -> torch.Tensor:
    x.pinned = True
    return x


def _apply(module: torch.nn.Module, function: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, which swaps the parameter's content: torch cannot do that with fake tensors."""
    there: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is None or (moved := function(x.detach())).device == x.device:
                continue
            if id(x) not in there:  # a tied one comes twice
                there[id(x)] = torch.nn.Parameter(moved, x.requires_grad)
                there[id(x)].__dict__.update(x.__dict__)
            part._parameters[name] = there[id(x)]
        part._buffers.update({name: function(x) for name, x in part._buffers.items() if x is not None})
    return module


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor)


@contextmanager
def fake_cuda(world_size: int = 1) -> Iterator[FakeCuda]:
    """A GPU in this process, rank 0 of a job; what the other ranks would send is what was there before."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemo_grpo.engine.megatron.parallel import shut_down

    ctypes.CDLL(os.environ["FAKE_CUDA_GUARD"])
    backend, store = ("gloo", dist.HashStore()) if world_size == 1 else ("fake", FakeStore())
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    mode = FakeCuda()
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(..., device="cuda"): made on the CPU, then copied
    with (
        mock.patch.multiple(torch.cuda, create=True, **_cuda(mode)),
        mock.patch.multiple(torch.cuda.random, get_rng_state=lambda *_a, **_k: torch.get_rng_state()),
        mock.patch.object(torch, "Generator", _generator),
        mock.patch.object(FakeTensor, "tolist", lambda x: x.cpu().tolist()),  # its own asks number by number
        mock.patch.object(FakeTensor, "data_ptr", lambda x: x.untyped_storage()._cdata),
        mock.patch.object(torch.nn.Module, "_apply", _apply),
        torch.autograd.set_multithreading_enabled(False),
        _InFrontOfTorch(mode),
        mode,
    ):
        yield mode
        shut_down()


def _cuda(mode: FakeCuda) -> dict[str, Any]:
    from nemo_grpo.cuda_stand_ins import Event, Stream

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def set_device(device: Any) -> None:
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")

    generator = torch.Generator()

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    return {
        **dict.fromkeys(("_lazy_init", "manual_seed", "manual_seed_all", "empty_cache"), nothing),
        **dict.fromkeys(("set_rng_state", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), always(True)),
        **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated"), always(0)),
        **dict.fromkeys(("Stream", "current_stream", "default_stream", "stream"), lambda *_a, **_k: Stream()),
        "device": lambda *_a: nullcontext(),
        "set_device": set_device,
        "Event": Event,
        "device_count": always(1),
        "get_device_capability": always((9, 0)),
        "get_device_name": always("a GPU that is not there"),
        "mem_get_info": always((80 * 2**30, 80 * 2**30)),
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "default_generators": defaultdict(lambda: generator),
        "is_current_stream_capturing": always(False),
        "synchronize": lambda *_a: mode.record("sync"),
        "nvtx": SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *_a: nullcontext()),
    }


def run(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """``fake_cuda_cases.<name>(**arguments)`` of each, in a process of their own; all goes through JSON."""
    return run_python(["-m", "fake_cuda_cases", json.dumps(cases)])


def run_python(arguments: list[str]) -> Any:
    """What Python with these arguments prints on its last line as JSON; it may call `fake_cuda`."""
    folder = Path(tempfile.mkdtemp())
    libraries = [_compiled(folder / "preload.so", ["-DPRELOAD"]), _compiled(folder / "guard.so", ["-lc10"])]
    folders = (Path(__file__).parent, ROOT / "tests", ROOT, ROOT / "benchmarks", ROOT / "tests" / "gpu")
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"LD_PRELOAD": str(libraries[0]), "FAKE_CUDA_GUARD": str(libraries[1])}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _compiled(library: Path, flags: list[str]) -> Path:
    folder = Path(torch.__file__).parent
    paths = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    source = str(Path(__file__).with_suffix(".cpp"))
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", *paths, source, "-o", str(library), *flags], check=True
    )
    return library
