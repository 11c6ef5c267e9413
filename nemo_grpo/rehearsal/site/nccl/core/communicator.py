"""Broadcasts through a TCPStore."""

from datetime import timedelta
from typing import Any, Self

import torch

from nccl.core.utils import UniqueId

PATIENCE = timedelta(minutes=5)


class Communicator:
    """The part of nccl4py's that NeMo-RL's `StatelessProcessGroup` uses."""

    def __init__(self, nranks: int, rank: int, unique_id: UniqueId) -> None:
        host, port = unique_id.as_bytes.decode().split(":")
        self.rank, self.number = rank, 0
        self.store = torch.distributed.TCPStore(host, int(port), nranks, rank == 0, timeout=PATIENCE)

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Self:
        """Join the group."""
        return cls(nranks, rank, unique_id)

    def broadcast(self, sendbuf: Any, recvbuf: Any, root: int, stream: Any = None) -> None:
        """Copy the root's ``sendbuf`` into every other rank's ``recvbuf``."""
        self.number += 1
        key = f"broadcast{self.number}"
        if self.rank == root:
            self.store.set(key, sendbuf.detach().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            got = torch.frombuffer(bytearray(self.store.get(key)), dtype=torch.uint8)
            recvbuf.copy_(got.view(recvbuf.dtype).view(recvbuf.shape))
