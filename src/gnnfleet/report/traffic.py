"""Traffic of one rank: payload bytes by receiving peer, and rounds of communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

EVERYONE = -1
"""Receiver of the bytes of all-reduces and broadcasts."""


@dataclass
class TrafficCounter:
    """Counts payload bytes as they are sent; may be used from several threads."""

    bytes_sent: int = 0
    rounds: int = 0
    bytes_by_peer: dict[int, int] = field(default_factory=dict)  # by global rank
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int, to: int = EVERYONE) -> None:
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_by_peer[to] = self.bytes_by_peer.get(to, 0) + nbytes

    def add_round(self) -> None:
        with self._lock:
            self.rounds += 1
