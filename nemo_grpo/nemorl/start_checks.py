"""Checks before NeMo-RL starts: Ray's address, and the packages of the driver and the Megatron workers.

The workers' Python may differ from the driver's: in NeMo-RL's container every kind has its own environment.
"""

import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import ACTOR_PYTHON
from nemo_grpo.nemorl.policy import STOCK_WORKER
from nemo_grpo.recipe import Recipe
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

ASYNC_SAVE = "policy.megatron_cfg.checkpoint.async_save"
PACKAGE = "nvidia_resiliency_ext"
TRANSFER_QUEUE = "transfer_queue"
ABSENT = 3
"""Exit code that means "absent"; any other code is no answer."""
TIMEOUT_S = 60
PATIENCE = 30.0
"""Seconds to wait for an address to answer, as while Ray starts."""


def check_async_save(master_config: Any) -> None:
    """Check that the workers have what asynchronous saving needs, the default of NeMo-RL after 0.7.0.

    Nothing is refused if the workers' Python is unknown (see `worker_python`).
    """
    if compat.version() == compat.V0_7_0 or not value_of(master_config, ASYNC_SAVE, False):
        return
    python = worker_python()
    if python is not None and lacks(python, PACKAGE):
        raise UserError(
            f"{ASYNC_SAVE}=true (NeMo-RL's default): {python}, which runs the Megatron workers, has no "
            f"{PACKAGE}, and they would die at start-up; set it to false, or install "
            f"{PACKAGE.replace('_', '-')} there"
        )


def check_data_plane(recipe: Recipe) -> None:
    """Check that the driver has TransferQueue; NeMo-RL's policy asks for it once all workers are up."""
    if recipe.uses_data_plane and importlib.util.find_spec(TRANSFER_QUEUE) is None:
        raise UserError(
            f"data_plane.enabled=true: the driver's Python has no {TRANSFER_QUEUE}; install TransferQueue, "
            "which NeMo-RL's pyproject.toml pins, or set it to false"
        )


def worker_python() -> str | None:
    """Find the interpreter of NeMo-RL's Megatron workers on this node.

    Returns: None if NeMo-RL creates their environment at start-up (by uv) and it does not exist yet.
    """
    command: str = compat.import_name(ACTOR_PYTHON)(STOCK_WORKER)
    if not command.startswith("uv"):
        return command
    if os.environ.get("NRL_FORCE_REBUILD_VENVS", "false").lower() == "true":
        return None
    default = compat.import_name("nemo_rl.utils.venvs:DEFAULT_VENV_DIR")
    python = Path(os.environ.get("NEMO_RL_VENV_DIR", default)) / STOCK_WORKER / "bin" / "python"
    return str(python) if python.exists() else None


def lacks(python: str, package: str) -> bool:
    """True if an interpreter reports that a package is missing; False also if it does not answer."""
    code = f"import importlib.util as u, sys; sys.exit({ABSENT} * (u.find_spec({package!r}) is None))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == ABSENT


def check_ray_address() -> None:
    """Wait until the cluster of RAY_ADDRESS answers, if it is set."""
    address = os.environ.get("RAY_ADDRESS", "")
    where = urlsplit(address if "://" in address else f"//{address}")
    if where.port is None:  # not set, auto or local: Ray finds or starts one
        return
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((where.hostname, where.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(
                    f"RAY_ADDRESS={address}: no Ray has answered there for {PATIENCE:.0f} s ({error}); start "
                    "its head, or unset RAY_ADDRESS"
                ) from None
            time.sleep(min(1.0, PATIENCE / 10))
