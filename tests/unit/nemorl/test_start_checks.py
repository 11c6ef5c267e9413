"""Ray that is gone, and packages that the workers lack, are refused before NeMo-RL starts."""

import socket
import sys
import threading
import time

import pytest
from processes import free_port

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.host_api import HEAD, STOCK_WORKER, V0_7_0
from nemo_grpo.nemorl.workarounds import async_save, ray_address
from nemo_grpo.support.errors import UserError

UV = "uv run --locked --extra mcore --directory /src"


def run(is_async):
    return ClusterRun(None, {"policy": {"megatron_cfg": {"checkpoint": {"async_save": is_async}}}})


@pytest.fixture
def nemo_rl(monkeypatch, tmp_path):
    """Its registry says this command; its environments lie in tmp_path."""
    names = {
        "get_actor_python_env": {STOCK_WORKER: sys.executable}.__getitem__,
        "DEFAULT_VENV_DIR": str(tmp_path),
    }
    monkeypatch.setattr(compat, "import_name", lambda name: names[name.partition(":")[2]])
    monkeypatch.setattr(compat, "version", lambda: HEAD)
    for name in ("NEMO_RL_VENV_DIR", "NRL_FORCE_REBUILD_VENVS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(async_save, "PACKAGE", "absent_package")

    def use(command):
        names["get_actor_python_env"] = lambda _worker: command

    return use


def test_missing_package_is_refused_with_the_remedy(nemo_rl, monkeypatch):
    with pytest.raises(UserError, match=r"async_save=true .*python.* no absent_package.* set it to false"):
        async_save.check_async_save(run(True))
    async_save.check_async_save(run(False))
    async_save.check_async_save(ClusterRun(None, {"policy": {"megatron_cfg": {}}}))
    with monkeypatch.context() as patch:
        patch.setattr(compat, "version", lambda: V0_7_0)  # which never saves asynchronously
        async_save.check_async_save(run(True))
    monkeypatch.setattr(async_save, "PACKAGE", "torch")
    async_save.check_async_save(run(True))


def test_existing_uv_environment_is_checked(nemo_rl, monkeypatch, tmp_path):
    for command in ("/absent/python", "false", UV):  # two without an answer; NeMo-RL will make the third
        nemo_rl(command)
        async_save.check_async_save(run(True))
    python = tmp_path / "own" / STOCK_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "own"))
    with pytest.raises(UserError, match="has no absent_package"):
        async_save.check_async_save(run(True))
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    async_save.check_async_save(run(True))


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_cluster_that_starts_late_is_waited_for(monkeypatch, prefix):
    for address in ("", "auto", "local"):  # left to Ray
        monkeypatch.setenv("RAY_ADDRESS", address)
        ray_address.check_ray_address()
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"{prefix}127.0.0.1:{port}")
    with socket.socket() as head:
        head.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        head.bind(("127.0.0.1", port))
        late = threading.Timer(0.3, head.listen)
        late.start()
        ray_address.check_ray_address()
        late.join()


def test_cluster_that_is_gone_is_noticed_in_time(monkeypatch):
    assert ray_address.PATIENCE <= 30
    monkeypatch.setattr(ray_address, "PATIENCE", 0.2)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"RAY_ADDRESS=127\.0\.0\.1:.*refused.*start its head"):
        ray_address.check_ray_address()
    assert time.monotonic() - start >= 0.2
