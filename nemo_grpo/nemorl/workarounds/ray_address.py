"""A RAY_ADDRESS at which no Ray cluster answers.

Ray tries to connect for minutes without an error, and NeMo-RL's `init_ray` then tries again. Meanwhile the
job's GPUs are idle.

Upstream: Ray issue 22413, closed without a change.
Versions: Ray 2.60 and older.
Needed while: tests/nemo_rl/test_workarounds.py::test_ray_tries_an_address_for_longer_than_we_wait
"""

import os
import socket
import time
from urllib.parse import urlsplit

PATIENCE = 30.0
"""Seconds to wait for an address to answer, as while Ray starts."""


def check_ray_address() -> None:
    """Wait until the cluster at RAY_ADDRESS answers, and raise after `PATIENCE`; return at once if unset."""
    address = os.environ.get("RAY_ADDRESS", "")
    # urlsplit takes host and port only after "//"; Ray's client has addresses such as ray://host:10001.
    location = urlsplit(address if "://" in address else f"//{address}")
    if location.port is None:
        # Not set, "auto" or "local": Ray finds a cluster or starts one.
        return
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((location.hostname, location.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(
                    f"RAY_ADDRESS={address}: no Ray has answered there for {PATIENCE:.0f} s ({error}); start "
                    "its head, or unset RAY_ADDRESS"
                ) from None
            time.sleep(min(1.0, PATIENCE / 10))
