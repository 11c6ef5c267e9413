"""Every module of tests leaves the process as it found it: they pass in any order, and side by side."""

import os
import sys
import threading
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side, a process per core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pytest

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Processes of Python's own that serve a whole session."""
NOT_OURS = (
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
    *(f"NVTE_{kind}_ATTN" for kind in ("FLASH", "FUSED", "UNFUSED")),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED"),
)
"""Variables that pytest, torch, megatron-core, scikit-learn, Ray and NeMo-RL set by themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that train come first, so that no worker is left with a long one at the end."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Before the first test; ``ranks`` is there where a test needs it."""
    if ranks := sys.modules.get("ranks"):
        ranks.start_server()


def state() -> dict[str, Any]:
    """What one module could leave behind for the next."""
    found: dict[str, Any] = {
        **{f"${name}": value for name, value in os.environ.items() if name not in NOT_OURS},
        "working directory": os.getcwd(),
        "threads": tuple(sorted(t.name for t in threading.enumerate() if t.name != "tqdm_monitor")),
        "processes": tuple(sorted(filter(None, map(_command, psutil.Process().children(recursive=True))))),
    }
    if torch := sys.modules.get("torch"):
        found["torch"] = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
        found["process group"] = torch.distributed.is_available() and torch.distributed.is_initialized()
    if megatron := sys.modules.get("megatron.core.parallel_state"):
        found["megatron"] = megatron.is_initialized()
    return found


def _command(process: psutil.Process) -> str | None:
    """Its command without its number: a node of the Slurm cluster may have been restarted."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return None
    return None if any(server in command for server in SERVERS) else command


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are filled and not painted, which takes most of a report's time; each file holds its name."""
    painter = "matplotlib.backends.backend_agg.FigureCanvasAgg.print_png"
    monkeypatch.setattr(painter, lambda self, path: path.write_bytes(b"\x89PNG" + path.name.encode()))


PATIENCE = 10.0
AT_FIRST = {"process group": False, "megatron": False}
"""What holds of a library that a module was the first to load."""


@pytest.fixture(autouse=True, scope="module")
def the_process_is_left_as_it_was_found(request):
    before = state()
    yield
    if request.node.get_closest_marker("vllm"):  # whose engine stays; it has a session of its own
        return
    if parallel := sys.modules.get("nemo_grpo.engine.megatron.parallel"):
        parallel.shut_down()  # what the engine leaves to whoever ends the process
    if pools := sys.modules.get("nemo_grpo.tasks.rewards.worker_pool"):
        pools.close_all()
    end = time.monotonic() + PATIENCE
    while (left := changes(before, state())) and time.monotonic() < end:
        time.sleep(0.05)  # threads and processes that have been told to end
    assert not left


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[tuple[str, Any]]:
    """What differs; a library that came in between counts from what it is like at first."""
    first = {what: AT_FIRST.get(what, now) for what, now in after.items() if not what.startswith("$")}
    return (first | before).items() ^ after.items()
