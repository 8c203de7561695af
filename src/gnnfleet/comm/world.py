"""World: the ranks that train together, as a value. One process is a World of size 1.

It is made in one place and handed down; there is no process group behind anyone's back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from gnnfleet.report.traffic import Traffic

EXCHANGE_SECONDS = 1800.0
"""What a single wait may take: a slow peer is healthy. Who is dead is found by the heartbeat, much earlier."""


@dataclass(frozen=True, eq=False)
class World:
    """Rank ``rank`` of ``size``. ``group`` is None exactly when there is nobody else."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: ProcessGroup | None = None
    timeout: float = EXCHANGE_SECONDS
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: files, progress, the record."""
        return self.rank == 0
