"""What one rank sent to others: payload bytes, and rounds in which peers met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Counted where the bytes are handed over, not estimated."""

    bytes_sent: int = 0
    rounds: int = 0

    def sent(self, nbytes: int) -> None:
        self.bytes_sent += nbytes

    def met(self) -> None:
        self.rounds += 1
