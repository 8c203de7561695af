"""A memory that the trainers of one copy share: they are of one machine, map its tables, and take turns.

No process serves it. In an iteration one batch is new (``schedule``); its trainers read, wait for each other, and write
the rows whose last event each of them has. The sum of gradients that ends an iteration is passed by nobody who has not
written, so the next batch is read after it. What is left to go wrong is noticed by a number that every writer leaves
in front of the tables: the iteration it wrote in. Waiting is the network's, with its timeouts, liveness and errors.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    """One copy. Its trainers make and call it together; a single trainer is the case of nobody to wait for."""

    def __init__(self, grid: Mesh, layout: TableLayout) -> None:
        axes = grid.axes
        ranks = [grid.rank_at(lane=lane, offset=at) for lane in range(axes["lane"]) for at in range(axes["offset"])]
        self.trainers = grid.world.subgroup("copy", ranks)
        self._sharers = grid.subgroup("offset")
        sizes = [(name, shape, dtype, _bytes(shape, dtype)) for name, shape, dtype in layout]
        head = -(-8 * axes["offset"] // _ALIGNED) * _ALIGNED
        whole = share_memory(self.trainers, head + sum(nbytes for *_, nbytes in sizes))
        self._written = whole[: 8 * axes["offset"]].view(torch.int64)  # [share] the iteration after the last write
        tables, at = {}, head
        for name, shape, dtype, nbytes in sizes:
            tables[name] = whole[at : at + nbytes].view(dtype)[: _count(shape)].view(shape)
            at += nbytes
        self.memory = NodeMemory(tables)
        if self.trainers.is_first:
            self.memory.reset()

    def begin(self, iteration: int) -> None:
        """Before some iterations, by all trainers: what is there now is what the first of them reads."""
        if self.trainers.is_first:
            self._written.fill_(iteration)
        barrier(self.trainers)

    def read(self, turn: IterationPlan, iteration: int, ids: Tensor) -> MemoryRows:
        """Rows for a batch that is used for the first time, as its predecessor left them."""
        if turn.starts_sweep:
            if self._sharers.is_first:
                self.memory.reset()
                self._written.fill_(iteration)
            barrier(self._sharers)
        if not bool((self._written == iteration).all()):
            raise ExchangeError(
                f"the memory of copy {turn.memory_copy} was written in iterations {self._written.tolist()}, expected "
                f"{iteration}: its trainers are out of step"
            )
        return self.memory.read(ids)

    def write(self, iteration: int, writes: MemoryUpdate | None) -> None:
        """What a trainer's piece of a batch leaves behind; no node is in two pieces' writes."""
        barrier(self._sharers)  # they have read
        if writes is not None:
            self.memory.write(writes)
        self._written[self._sharers.rank] = iteration + 1


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_count(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
