"""What one rank sent to others: payload bytes, to whom, and rounds in which peers met."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

EVERYONE = -1
"""To whom bytes of sums and of words from the first rank go."""


@dataclass
class TrafficCounter:
    """Counted where the bytes are handed over, not estimated; by several threads."""

    bytes_sent: int = 0
    rounds: int = 0
    bytes_by_peer: dict[int, int] = field(default_factory=dict)  # bytes by peer, as the whole World numbers them
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int, to: int = EVERYONE) -> None:
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_by_peer[to] = self.bytes_by_peer.get(to, 0) + nbytes

    def add_round(self) -> None:
        with self._lock:
            self.rounds += 1
