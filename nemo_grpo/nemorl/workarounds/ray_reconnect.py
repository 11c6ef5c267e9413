"""A new connection of Ray while the driver ends.

An actor's handle that is freed after Ray has shut down calls Ray, which connects again and waits for a
cluster that is gone. The driver hangs instead of returning its exit code. NeMo-RL's policy frees its workers
this late.

Upstream: none known.
Versions: Ray 2.60 and older.
Needed while: tests/nemo_rl/test_workarounds.py::test_ray_starts_by_itself_when_it_is_called_after_its_end
"""

import importlib
import os

VARIABLE = "RAY_ENABLE_AUTO_CONNECT"


def forbid_reconnects() -> None:
    """Import Ray so that this process connects only by `ray.init`; call it before anything imports Ray."""
    # Ray reads the variable when it is imported. It must not stay: workers inherit the environment and must
    # connect by themselves, as vLLM's engine process does.
    os.environ[VARIABLE] = "0"
    importlib.import_module("ray")
    del os.environ[VARIABLE]
