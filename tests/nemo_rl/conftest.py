"""NeMo-RL's own source, found through NEMO_RL_SRC, on a CPU: what it needs replaced to be imported there.

Nothing of NeMo-RL's algorithms is replaced: only the Python version it asks for, and devices named cuda.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_grpo.rehearsal.cluster import SLOW_START
from nemo_grpo.support.fake_cuda import here

HERE = Path(__file__).parent

SOURCE = os.environ.get("NEMO_RL_SRC")
if SOURCE is None or find_spec("tensordict") is None:  # `make test-nemo-rl` says what is needed, and has it
    collect_ignore_glob = ["test_*.py"]
else:
    if not (Path(SOURCE) / "nemo_rl" / "__init__.py").is_file():
        raise pytest.UsageError(f"NEMO_RL_SRC={SOURCE} holds no nemo_rl package")
    sys.path.insert(0, SOURCE)
    import newer_python  # noqa: F401 - it changes `typing` for the whole process

    os.environ |= {"HF_HUB_OFFLINE": "1", "NO_VCS_VERSION": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    os.environ |= SLOW_START


class CudaMeansCpu(TorchFunctionMode):
    """Everything asked for on a CUDA device is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = here(kwargs["device"])
        return function(*(here(a) if isinstance(a, str | torch.device) else a for a in args), **kwargs)


@pytest.fixture(autouse=True)
def cuda_means_cpu(monkeypatch):
    """The tests of this folder run where there is no GPU."""
    if not torch.cuda.is_available():
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    with CudaMeansCpu():
        yield


@pytest.fixture(scope="module")
def private_ray():
    """A Ray of this module's own; NeMo-RL would join any other that runs on the host."""
    import ray

    paths = {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE, SOURCE)))}
    with mock.patch.dict(os.environ, paths):  # NeMo-RL hands the driver's environment to its workers
        os.environ.pop("RAY_ADDRESS", None)
        context = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": paths},
        )
        os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
        yield
        ray.shutdown()


@pytest.fixture
def names_are_restored(monkeypatch):
    """The driver rebinds NeMo-RL's globals for good, a test for itself."""
    from nemo_grpo.nemorl.compat import places
    from nemo_grpo.nemorl.host_api import REBOUND

    for key in ("estimator", "sampling"):
        for owner, name in places(REBOUND[key]):
            monkeypatch.setattr(owner, name, getattr(owner, name))


def pytest_collection_modifyitems(items):
    """Everything in this folder carries the marker, and NeMo-RL's warnings are its own."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.nemo_rl)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
