"""A TCPStore that listens on one address only. torch's own constructor listens on every interface of the machine."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

BACKLOG = 128


def serve_store(host: str, port: int = 0, *, seconds: float) -> tuple[TCPStore, int]:
    """Start a store at ``host:port`` and connect to it; returns the connection and the port.

    Port 0 picks a free one. The server ends with the returned object. ``seconds`` is the store's timeout.
    Raises OSError when the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        bound = int(listener.getsockname()[1])
        store = TCPStore(
            local_address(host),
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=os.dup(listener.fileno()),
        )
    return store, bound


def local_address(host: str) -> str:
    """The address under which a server that listens on ``host`` is reached from its own machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
