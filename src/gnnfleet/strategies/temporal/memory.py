"""Node memory (TGN): per node a memory, the mail of its last event, and the events that both come from.

Times are not stored: they are read from the stream by event, without rounding. Tables are written in place and may lie
in shared memory.
V nodes, n rows, D columns of a memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NO_EVENT = -1
"""Event number of a node without events."""


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Memory and mail of some nodes, zeros for a node without events. Events are positions in the stream."""

    memory: Tensor  # [n, D]
    mail: Tensor  # [n, 2 D]: memories of the node and of the other end of its last event
    mail_event: Tensor  # [n] int64: the last event
    memory_event: Tensor  # [n] int64: event of the last applied mail; its time is the time of the memory

    def select(self, index: Tensor) -> MemoryRows:
        return MemoryRows(**{name: table.index_select(0, index) for name, table in vars(self).items()})


@dataclass(frozen=True, eq=False)
class MemoryUpdate:
    """Memory write of a batch: each node at most once, with its last event of the global batch."""

    ids: Tensor  # [n] int64
    memory: Tensor  # [n, D]
    mail: Tensor  # [n, 2 D]
    event: Tensor  # [n] int64


class NodeMemory:
    """Node memory after some prefix of a stream. ``tables`` are the live tensors by name."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self.tables = dict(tables)

    @classmethod
    def empty(cls, num_nodes: int, width: int, dtype: torch.dtype = torch.float32) -> NodeMemory:
        """Allocate the memory before the first event."""
        memory = cls({name: torch.empty(size, dtype=kind) for name, size, kind in cls.layout(num_nodes, width, dtype)})
        memory.reset()
        return memory

    @staticmethod
    def layout(num_nodes: int, width: int, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) of each table."""
        return [
            ("memory", (num_nodes, width), dtype),
            ("mail", (num_nodes, 2 * width), dtype),
            ("mail_event", (num_nodes,), torch.int64),
            ("memory_event", (num_nodes,), torch.int64),
        ]

    def reset(self) -> None:
        """Return to the state before the first event."""
        for name, table in self.tables.items():
            table.fill_(NO_EVENT) if name.endswith("event") else table.zero_()

    def read(self, ids: Tensor) -> MemoryRows:
        """Copy some rows."""
        return MemoryRows(**{name: table.index_select(0, ids) for name, table in self.tables.items()})

    def write(self, update: MemoryUpdate) -> None:
        """Write the memories and mails of a batch; the previous mails are part of the new memories."""
        tables, ids = self.tables, update.ids
        mailed = tables["mail_event"][ids]
        # A memory without a mail has a time if it starts within the stream (``MemoryScheduler.begin``).
        tables["memory_event"][ids] = torch.where(mailed == NO_EVENT, tables["memory_event"][ids], mailed)
        tables["mail_event"][ids] = update.event
        tables["memory"][ids] = update.memory
        tables["mail"][ids] = update.mail

    def load(self, tables: Mapping[str, Tensor]) -> None:
        for name, table in self.tables.items():
            table.copy_(tables[name])
