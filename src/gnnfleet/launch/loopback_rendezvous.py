"""Rendezvous for the workers of one machine: a store that listens on 127.0.0.1, and no negotiation.

torchrun's c10d backend listens on every interface and unpickles the state it finds in its store: whoever reaches that
port runs code as the user who trains. With a single agent there is nothing to agree on, so nothing is unpickled here.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gnnfleet.comm.store_server import serve_store

BACKEND = "gnnfleet-loopback"
LOOPBACK = "127.0.0.1"
STORE_SECONDS = 60.0


class LoopbackRendezvous(RendezvousHandler):
    """The only agent of a run. Every restart gets keys of its own in the same store."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._store: TCPStore | None = None
        self._port = 0
        self._rounds = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers meet in the agent's store, so rank 0 does not open a second one on every interface."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store, self._port = serve_store(LOOPBACK, seconds=STORE_SECONDS)
        self._rounds += 1
        store = PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join, so there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def register() -> str:
    """Make the backend known to torch.distributed and return its name."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    return BACKEND
