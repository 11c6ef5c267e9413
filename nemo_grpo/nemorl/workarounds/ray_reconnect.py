"""Ray that connects again while the driver ends.

A handle that is freed after Ray has shut down calls Ray, which then starts anew and waits for a cluster that
is gone: the driver hangs instead of ending with its exit code. NeMo-RL's policy frees its workers like that.

Upstream: none known.
Versions: Ray 2.60 and older.
Needed while: tests/nemo_rl/test_workarounds.py::test_ray_starts_by_itself_when_it_is_called_after_its_end
"""

import importlib
import os

VARIABLE = "RAY_ENABLE_AUTO_CONNECT"


def forbid_reconnects() -> None:
    """Import Ray so that this process connects only where it asks to; before anything else imports it."""
    # Ray reads the variable when it is imported. It must not stay: workers inherit the environment and must
    # connect by themselves, as vLLM's engine process does.
    os.environ[VARIABLE] = "0"
    importlib.import_module("ray")
    del os.environ[VARIABLE]
