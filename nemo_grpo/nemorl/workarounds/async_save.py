"""A driver that starts Megatron workers which cannot save asynchronously.

NeMo-RL saves asynchronously by default, but does not look for nvidia_resiliency_ext. Without that package the
workers die when they start, minutes after the driver has. The workers' Python may differ from the driver's:
in NeMo-RL's container every kind of worker has its own environment.

Upstream: none known; NeMo-RL pull request 2828 brought the default.
Versions: NeMo-RL 7ea279abf; 0.7.0 never saves asynchronously.
Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_saves_asynchronously_and_looks_for_no_package
"""

import os
import subprocess
from pathlib import Path

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import ASYNC_SAVE, ClusterRun
from nemo_grpo.nemorl.host_api import ACTOR_PYTHON, STOCK_WORKER
from nemo_grpo.support.errors import UserError

PACKAGE = "nvidia_resiliency_ext"
ABSENT = 3
"""Exit code that means "absent"; any other code is no answer."""
TIMEOUT_S = 60


def check_async_save(run: ClusterRun) -> None:
    """Refuse asynchronous saving if the Megatron workers' Python lacks the package.

    A run whose workers' Python is unknown is not refused, see `worker_python`.
    """
    if compat.version() == compat.V0_7_0 or not run.saves_async:
        return
    python = worker_python()
    if python is not None and lacks(python, PACKAGE):
        raise UserError(
            f"{ASYNC_SAVE}=true (NeMo-RL's default): {python}, which runs the Megatron workers, has no "
            f"{PACKAGE}, and they would die at start-up; set it to false, or install "
            f"{PACKAGE.replace('_', '-')} there"
        )


def worker_python() -> str | None:
    """Find the interpreter of NeMo-RL's Megatron workers on this node.

    Returns:
        None if NeMo-RL creates their environment at start-up (by uv) and it does not exist yet.
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
    """Return True if an interpreter reports that a package is missing; False also if it does not answer."""
    code = (
        "import importlib.util, sys\n"
        f"if importlib.util.find_spec({package!r}) is None:\n"
        f"    sys.exit({ABSENT})\n"
    )
    try:
        process = subprocess.run([python, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == ABSENT
