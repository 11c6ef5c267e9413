"""A group's id is the address of its store."""

import socket
from typing import Self


class UniqueId:
    """The id that the first rank sends to the others."""

    def __init__(self, raw: bytes) -> None:
        self.as_bytes = raw

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The id received from another rank."""
        return cls(bytes(raw))


def get_unique_id() -> UniqueId:
    """An address that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return UniqueId(f"127.0.0.1:{probe.getsockname()[1]}".encode())
