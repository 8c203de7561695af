"""A trainer's place in the schedule: the pieces of batches it looks up, the memory it shares, what it holds in between.

A lane reads once for all uses of a batch: every node that any of them looks at, as it was before the batch. What it
read stays with it until the last use, since the memory moves on.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.world import World
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.batch_step import EventBatch, last_events
from gnnfleet.strategies.temporal.memory import NO_EVENT, MemoryRows, MemoryUpdate
from gnnfleet.strategies.temporal.schedule import IterationPlan, Schedule
from gnnfleet.strategies.temporal.shared_memory import SharedNodeMemory, TableLayout

MEMORY_PREFIX, CACHED_PREFIX = "memory/", "held/"


class LookUp(Protocol):
    """Finds what events ``low`` to ``high`` of a batch ``whole`` look at in a pass over the stream."""

    def __call__(self, low: int, high: int, number: int, *, whole: tuple[int, int]) -> EventBatch: ...


@dataclass(frozen=True, eq=False)
class WorkItem:
    """What a trainer does in an iteration."""

    iteration: int
    plan: IterationPlan
    batch: EventBatch | None = None  # its piece; None: idle, or there are fewer events than trainers
    memory_ids: Tensor | None = None  # [n] nodes ascending: where memory is read, those that any use looks at


@dataclass(frozen=True, eq=False)
class CachedRead:
    """What was read for a batch in an iteration."""

    iteration: int
    ids: Tensor
    rows: MemoryRows

    def select(self, nodes: Tensor) -> MemoryRows:
        return self.rows if nodes is self.ids else self.rows.select(torch.searchsorted(self.ids, nodes))


class MemoryScheduler:
    """All ranks make it together. ``bounds`` are those of batches, ``T + 1`` of them."""

    def __init__(
        self,
        world: World,
        schedule: Schedule,
        bounds: Sequence[int],
        look_up: LookUp,
        layout: TableLayout,
        stream: EventStream,
    ) -> None:
        self.schedule, self.bounds, self._look_up = schedule, bounds, look_up
        self._rank, self._stream = world.rank, stream
        grid = Mesh(world, schedule.layout.axes)
        self._offset = grid.coordinates["offset"]
        self.shared = SharedNodeMemory(grid, layout)
        self._held: CachedRead | None = None

    def items(self, begin: int, end: int) -> Generator[WorkItem]:
        """What this trainer does in some iterations; may be asked for ahead, in a thread."""
        uses: list[EventBatch | None] = []  # those to come of the batch it is at
        for iteration in range(begin, end):
            turn = self.schedule.iteration_plan(self._rank, iteration)
            if turn.is_first or (iteration == begin and self._goes_on(turn, iteration)):
                uses = self._uses(turn)
            if not uses:  # idle, or nothing was read for a batch that was begun before
                yield WorkItem(iteration, IterationPlan(turn.memory_copy, turn.sweep, turn.phase, None))
                continue
            nodes = _union([use.block.nodes for use in uses if use is not None]) if turn.is_first else None
            yield WorkItem(iteration, turn, uses.pop(0), nodes)

    def begin(self, iteration: int) -> None:
        """Before the first of some iterations, by all ranks. A memory that begins within the stream is empty, but knows
        when its nodes had their last events: a mail says how long ago that was, or when a node came."""
        phase = self.schedule.iteration_plan(self._rank, iteration).phase
        if self.shared.trainers.is_first and 0 < phase < self.schedule.batches:
            tables = self.shared.memory.tables
            if tables["memory"].numel() and bool((tables["mail_event"] == NO_EVENT).all()):
                ids, event, _ = last_events(self._stream, 0, self.bounds[phase])
                tables["memory_event"][ids] = event
        self.shared.begin(iteration)

    def read(self, work: WorkItem) -> MemoryRows | None:
        """What is remembered of the nodes that a piece looks at; None where there is no piece."""
        if work.memory_ids is not None:
            rows = self.shared.read(work.plan, work.iteration, work.memory_ids)
            self._held = CachedRead(work.iteration, work.memory_ids, rows)
        if work.batch is None:
            return None
        assert self._held is not None
        return self._held.select(work.batch.block.nodes)

    def write(self, work: WorkItem, writes: MemoryUpdate | None) -> None:
        """What a piece leaves behind; called in every iteration, it writes in those where memory was read."""
        if work.plan.is_first:
            self.shared.write(work.iteration, writes)

    def state(self) -> dict[str, Tensor]:
        """What this trainer needs to go on, live tensors: of a copy its first trainer keeps the memory."""
        found = {"shape": torch.tensor(list(self.schedule.layout.axes.values()))}
        if self.shared.trainers.is_first:
            found |= {MEMORY_PREFIX + name: table for name, table in self.shared.memory.state_dict().items()}
        if self._held is not None and self.schedule.layout.epoch_parallel > 1:
            at = torch.tensor(self._held.iteration)
            found |= {f"{CACHED_PREFIX}iteration": at, f"{CACHED_PREFIX}nodes": self._held.ids}
            found |= {CACHED_PREFIX + name: rows for name, rows in vars(self._held.rows).items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of ``state``, on all ranks before ``begin``; nothing where trainers were arranged otherwise."""
        if state["shape"].tolist() != list(self.schedule.layout.axes.values()):
            return
        if tables := _below(MEMORY_PREFIX, state):
            self.shared.memory.load_state_dict(tables)
        held = _below(CACHED_PREFIX, state)
        self._held = None
        if held:
            at, ids = int(held.pop("iteration")), held.pop("nodes")
            self._held = CachedRead(at, ids.clone(), MemoryRows(**{name: rows.clone() for name, rows in held.items()}))

    def _goes_on(self, turn: IterationPlan, iteration: int) -> bool:
        return turn.batch is not None and self._held is not None and self._held.iteration == iteration - turn.use

    def _uses(self, turn: IterationPlan) -> list[EventBatch | None]:
        """This trainer's piece for the present use of a batch and those that follow."""
        assert turn.batch is not None
        share = self.schedule.layout.batch_parallel
        whole = self.bounds[turn.batch], self.bounds[turn.batch + 1]
        low, high = (whole[0] + (whole[1] - whole[0]) * at // share for at in (self._offset, self._offset + 1))
        if low == high:
            return [None] * (self.schedule.layout.epoch_parallel - turn.use)
        numbers = range(turn.number, turn.number + self.schedule.layout.epoch_parallel - turn.use)
        return [self._look_up(low, high, number, whole=whole) for number in numbers]


def _union(nodes: Sequence[Tensor]) -> Tensor:
    if not nodes:
        return torch.empty(0, dtype=torch.int64)
    return nodes[0] if len(nodes) == 1 else torch.unique(torch.cat(list(nodes)))


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
