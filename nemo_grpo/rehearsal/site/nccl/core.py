"""Stand-in for nccl4py, as far as NeMo-RL uses it: broadcasts of a few megabytes through a TCPStore."""

import socket
import sys
from datetime import timedelta
from typing import Any, Self

import torch

SUM = "sum"
"""Operation that NeMo-RL imports but does not use here."""
PATIENCE = timedelta(minutes=5)


class UniqueId:
    """The address of a group's store, which the first rank sends to the others."""

    def __init__(self, raw: bytes) -> None:
        self.as_bytes = raw

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        return cls(bytes(raw))


def get_unique_id() -> UniqueId:
    """Find an address that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return UniqueId(f"127.0.0.1:{probe.getsockname()[1]}".encode())


class Communicator:
    """A rank of a group."""

    def __init__(self, nranks: int, rank: int, unique_id: UniqueId) -> None:
        host, port = unique_id.as_bytes.decode().split(":")
        self.rank = rank
        self.num_broadcasts = 0
        self.store = torch.distributed.TCPStore(host, int(port), nranks, rank == 0, timeout=PATIENCE)

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Self:
        return cls(nranks, rank, unique_id)

    def broadcast(self, sendbuf: Any, recvbuf: Any, root: int, stream: Any = None) -> None:
        """Copy the root's ``sendbuf`` into every other rank's ``recvbuf``."""
        # All ranks broadcast in the same order, so a broadcast has the same number on each.
        self.num_broadcasts += 1
        key = f"broadcast{self.num_broadcasts}"
        if self.rank == root:
            self.store.set(key, sendbuf.detach().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            received = torch.frombuffer(bytearray(self.store.get(key)), dtype=torch.uint8)
            recvbuf.copy_(received.view(recvbuf.dtype).view(recvbuf.shape))


# nccl4py has these as modules of their own, and NeMo-RL imports names from all three.
sys.modules |= {f"{__name__}.communicator": sys.modules[__name__], f"{__name__}.utils": sys.modules[__name__]}
