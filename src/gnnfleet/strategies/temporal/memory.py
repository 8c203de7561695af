"""What is remembered of every node: its memory, the mail of its last event, and which events these come from.

Times are not kept: they are the stream's, at the positions kept here, so nothing is lost to rounding. Everything is
written in place; tables that lie in shared memory serve as well as others.
V nodes, n rows, D columns of a memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NO_EVENT = -1
"""In place of an event: there was none."""


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """What is remembered of some nodes, all zeros for one that has had no event. Events are positions in the stream."""

    memory: Tensor  # [n, D]
    mail: Tensor  # [n, 2 D]: memories of the node and of the other end of its last event
    mail_event: Tensor  # [n] int64: that event
    memory_event: Tensor  # [n] int64: the event whose mail went into the memory, so the memory's time

    def select(self, index: Tensor) -> MemoryRows:
        """Some of the rows."""
        return MemoryRows(
            *(each.index_select(0, index) for each in (self.memory, self.mail, self.mail_event, self.memory_event))
        )


@dataclass(frozen=True, eq=False)
class MemoryUpdate:
    """What a batch leaves behind: every node at most once, with its last event of the (global) batch."""

    ids: Tensor  # [n] int64
    memory: Tensor  # [n, D]
    mail: Tensor  # [n, 2 D]
    event: Tensor  # [n] int64


class NodeMemory:
    """The state of a stream up to some event. ``tables`` are the live tensors, by name."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self.tables = dict(tables)

    @classmethod
    def empty(cls, num_nodes: int, width: int, dtype: torch.dtype = torch.float32) -> NodeMemory:
        """Before the first event."""
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
        """Forget everything."""
        for name, table in self.tables.items():
            table.fill_(NO_EVENT) if name.endswith("event") else table.zero_()

    def read(self, ids: Tensor) -> MemoryRows:
        """Copies of some rows."""
        return MemoryRows(**{name: table.index_select(0, ids) for name, table in self.tables.items()})

    def write(self, writes: MemoryUpdate) -> None:
        """After a batch: the mail that was read has gone into the memory, a new one takes its place."""
        tables, ids = self.tables, writes.ids
        mailed = tables["mail_event"][ids]
        # Without a mail a memory may have a time all the same: one that begins within the stream (``MemoryScheduler.begin``).
        tables["memory_event"][ids] = torch.where(mailed == NO_EVENT, tables["memory_event"][ids], mailed)
        tables["mail_event"][ids] = writes.event
        tables["memory"][ids] = writes.memory
        tables["mail"][ids] = writes.mail

    def copy(self) -> NodeMemory:
        """The same in tables of its own."""
        return NodeMemory({name: table.clone() for name, table in self.tables.items()})

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors, not copies."""
        return dict(self.tables)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, table in self.tables.items():
            table.copy_(state[name])
