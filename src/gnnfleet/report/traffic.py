"""What one rank sent to others: payload bytes, and rounds in which peers met."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock


@dataclass
class Traffic:
    """Counted where the bytes are handed over, not estimated; by several threads."""

    bytes_sent: int = 0
    rounds: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def sent(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_sent += nbytes

    def met(self) -> None:
        with self._lock:
            self.rounds += 1
