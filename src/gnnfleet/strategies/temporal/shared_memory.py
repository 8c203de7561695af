"""Node memory shared by trainers of one machine, which map its tables.

No process serves the memory. In an iteration one batch is new (``schedule``): its trainers read, meet at a barrier, and
write the nodes whose last event each of them has. The sum of gradients that ends the iteration orders these writes
before the next read. A number in front of the tables, the iteration of each writer's last write, detects trainers out
of step. All waiting is done by collectives, with their timeouts, failure detection and errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from gnnfleet.comm.collectives import barrier
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.shared_memory import share_memory
from gnnfleet.errors import ExchangeError
from gnnfleet.strategies.temporal.memory import MemoryRows, MemoryUpdate, NodeMemory
from gnnfleet.strategies.temporal.schedule import IterationPlan

TableLayout = Iterable[tuple[str, tuple[int, ...], torch.dtype]]

_ALIGNED = 64


class SharedNodeMemory:
    """One copy of the node memory. Collective calls are over its trainers; it may have a single one."""

    def __init__(self, mesh: Mesh, layout: TableLayout) -> None:
        lanes, sharers = mesh.axes["epoch"], mesh.axes["batch"]
        ranks = [mesh.rank_at(epoch=lane, batch=index) for lane in range(lanes) for index in range(sharers)]
        self.trainers = mesh.world.subgroup("memory", ranks)
        self._sharers = mesh.subgroup("batch")  # trainers of the same batch
        sizes = [(name, shape, dtype, _bytes(shape, dtype)) for name, shape, dtype in layout]
        offset = -(-8 * sharers // _ALIGNED) * _ALIGNED
        buffer = share_memory(self.trainers, offset + sum(nbytes for *_, nbytes in sizes))
        self._next_iteration = buffer[: 8 * sharers].view(torch.int64)  # [i] the iteration after each last write
        tables = {}
        for name, shape, dtype, nbytes in sizes:
            tables[name] = buffer[offset : offset + nbytes].view(dtype)[: prod(shape)].view(shape)
            offset += nbytes
        self.memory = NodeMemory(tables)
        if self.trainers.is_first:
            self.memory.reset()

    def begin(self, iteration: int) -> None:
        """Collective. Start at an iteration: its read accepts the present tables."""
        if self.trainers.is_first:
            self._next_iteration.fill_(iteration)
        barrier(self.trainers)

    def read(self, plan: IterationPlan, iteration: int, ids: Tensor) -> MemoryRows:
        """Collective over the trainers of a batch. Read rows for its first use, after the previous batch's write."""
        if plan.starts_sweep:
            if self._sharers.is_first:
                self.memory.reset()
                self._next_iteration.fill_(iteration)
            barrier(self._sharers)
        if not bool((self._next_iteration == iteration).all()):
            raise ExchangeError(
                f"trainers of memory copy {plan.memory_copy} are out of step: their last writes were before iterations "
                f"{self._next_iteration.tolist()}, expected {iteration}"
            )
        return self.memory.read(ids)

    def write(self, iteration: int, update: MemoryUpdate | None) -> None:
        """Collective over the trainers of a batch. Write a trainer's share; no node is in two shares."""
        barrier(self._sharers)  # all of them have read
        if update is not None:
            self.memory.write(update)
        self._next_iteration[self._sharers.rank] = iteration + 1


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
