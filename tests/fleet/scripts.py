"""Functions that tests start with ``gf.launch``."""

from __future__ import annotations

import os
import signal
from typing import Any

import gnnfleet as gf
from tests.graphs import communities


def loop(fault: str, steps: int) -> dict[str, Any]:
    """A loop on a graph in memory, of which rank 1 has a fault."""
    fleet = gf.Fleet(seed=5)
    data = fleet.open(communities(100), partition="random")
    if fleet.rank == 1:
        if fault == "raise":
            raise ValueError("a bad batch")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    total = 0.0
    for _ in range(steps):
        total += float(fleet.sum(data.num_nodes))
    return {"size": fleet.size, "again": gf.Fleet().size, "total": total, "classes": data.num_classes}
