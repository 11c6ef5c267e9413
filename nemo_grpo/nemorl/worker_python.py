"""What the Megatron workers' Python must have, asked before any worker starts.

It need not be the driver's: in NeMo-RL's container every kind of worker has an environment of its own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.compat import value
from nemo_grpo.nemorl.policy import STOCK_WORKER

ASYNC_SAVE = "policy.megatron_cfg.checkpoint.async_save"
PACKAGE = "nvidia_resiliency_ext"
ABSENT = 3
"""Exit code of the question; any other is no answer."""
TIMEOUT_S = 60


def check_async_save(master_config: Any) -> None:
    """That the workers have what asynchronous saving needs; NeMo-RL after 0.7.0 saves so by default.

    Where it cannot be known (see `worker_python`), nothing is refused.

    Raises: UserError: they do not; every worker would die when it starts.
    """
    if compat.version() == compat.V0_7_0 or not value(master_config, ASYNC_SAVE, False):
        return
    python = worker_python()
    if python is not None and lacks(python, PACKAGE):
        raise UserError(
            f"{ASYNC_SAVE}=true (NeMo-RL's default): {python}, which runs the Megatron workers, has no "
            f"{PACKAGE}, and they would end when they start; set it to false, or install "
            f"{PACKAGE.replace('_', '-')} there"
        )


def worker_python() -> str | None:
    """The interpreter of NeMo-RL's Megatron workers on this node.

    Returns: None where NeMo-RL makes their environment when they start: uv, and none there yet.
    """
    registry = "nemo_rl.distributed.ray_actor_environment_registry"
    command: str = compat.import_name(f"{registry}:get_actor_python_env")(STOCK_WORKER)
    if not command.startswith("uv"):
        return command
    if os.environ.get("NRL_FORCE_REBUILD_VENVS", "false").lower() == "true":
        return None
    default = compat.import_name("nemo_rl.utils.venvs:DEFAULT_VENV_DIR")
    python = Path(os.environ.get("NEMO_RL_VENV_DIR", default)) / STOCK_WORKER / "bin" / "python"
    return str(python) if python.exists() else None


def lacks(python: str, package: str) -> bool:
    """True if an interpreter says that it cannot find a package; False also if it gives no answer."""
    question = (
        f"import importlib.util, sys; sys.exit({ABSENT} * (importlib.util.find_spec({package!r}) is None))"
    )
    try:
        asked = subprocess.run([python, "-c", question], capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == ABSENT
