"""TCP ports for processes on this machine that have to agree on one before any of them listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nothing else gets by asking for a free one, while the block runs.

    The socket that holds it does not listen and has SO_REUSEADDR, so a server that sets it, too, can
    listen there; torch's TCPStore does. A port that is only looked up and let go is now and then taken by an
    outgoing connection before the server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """A port that is free right now; for servers that cannot take a `reserved_port`."""
    with reserved_port() as port:
        return port
