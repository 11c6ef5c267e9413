"""What the Megatron workers' interpreter lacks is said before they start, and only if it is known."""

import sys

import pytest

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import compat, worker_python
from nemo_grpo.nemorl.policy import STOCK_WORKER

UV = "uv run --locked --extra mcore --directory /src"


def config(async_save):
    return {"policy": {"megatron_cfg": {"checkpoint": {"async_save": async_save}}}}


@pytest.fixture
def nemo_rl(monkeypatch, tmp_path):
    """Its registry says this command; its environments lie in tmp_path."""
    names = {
        "get_actor_python_env": {STOCK_WORKER: sys.executable}.__getitem__,
        "DEFAULT_VENV_DIR": str(tmp_path),
    }
    monkeypatch.setattr(compat, "import_name", lambda name: names[name.partition(":")[2]])
    monkeypatch.setattr(compat, "version", lambda: compat.HEAD)
    for name in ("NEMO_RL_VENV_DIR", "NRL_FORCE_REBUILD_VENVS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_python, "PACKAGE", "absent_package")

    def use(command):
        names["get_actor_python_env"] = lambda _worker: command

    return use


def environment(folder):
    """A worker's environment of uv: this interpreter."""
    python = folder / STOCK_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)


def test_missing_package_is_refused_with_the_remedy(nemo_rl, monkeypatch):
    with pytest.raises(UserError, match=r"async_save=true .*python.* no absent_package.* set it to false"):
        worker_python.check_async_save(config(True))
    worker_python.check_async_save(config(False))
    worker_python.check_async_save({"policy": {"megatron_cfg": {}}})
    monkeypatch.setattr(worker_python, "PACKAGE", "torch")
    worker_python.check_async_save(config(True))


def test_0_7_0_never_saves_asynchronously(nemo_rl, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: compat.V0_7_0)
    worker_python.check_async_save(config(True))


def test_existing_uv_environment_is_checked(nemo_rl, monkeypatch, tmp_path):
    nemo_rl(UV)
    worker_python.check_async_save(config(True))  # NeMo-RL will make it, of packages that it knows
    environment(tmp_path / "own")
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "own"))
    with pytest.raises(UserError, match="has no absent_package"):
        worker_python.check_async_save(config(True))
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    worker_python.check_async_save(config(True))


def test_interpreter_without_an_answer_refuses_nothing(nemo_rl):
    for command in ("/absent/python", "false"):
        nemo_rl(command)
        worker_python.check_async_save(config(True))
