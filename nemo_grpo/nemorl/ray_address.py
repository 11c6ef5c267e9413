"""Notices a Ray that is gone before NeMo-RL waits minutes for it."""

import os
import socket
import time
from urllib.parse import urlsplit

PATIENCE = 30.0
"""Seconds for which an address may not answer, as while Ray starts."""


def check_ray_address() -> None:
    """Wait until the cluster of RAY_ADDRESS answers, if it is set.

    Raises: ConnectionError: it does not within `PATIENCE`.
    """
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
