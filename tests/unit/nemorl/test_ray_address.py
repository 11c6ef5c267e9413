"""RAY_ADDRESS of a cluster that runs, starts late, or is gone."""

import socket
import threading
import time

import pytest

from nemo_grpo.nemorl import ray_address
from nemo_grpo.ports import free_port


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_address_without_a_port_is_left_to_ray(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    ray_address.check_ray_address()


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_cluster_that_starts_late_is_waited_for(monkeypatch, prefix):
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
