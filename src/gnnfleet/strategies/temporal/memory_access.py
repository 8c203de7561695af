"""Node memory shared by the trainers of one machine, and a trainer's reads and writes of it, by the schedule.

No process serves the memory: trainers map its tables. In an iteration one batch is new (``schedule``): its trainers
read, meet at a barrier, and write the nodes whose last event each of them has. The sum of gradients that ends the
iteration orders these writes before the next read. A number in front of the tables, the iteration of each writer's last
write, detects trainers out of step. All waiting is done by collectives, with their timeouts and errors.

A lane reads the memory once for all uses of a batch: all nodes that any use needs, as they were before the batch. It
keeps these rows until the last use, because the memory advances in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gnnfleet.comm.collectives import barrier
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.shared_memory import share_memory
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.batch_step import EventBatch, last_events
from gnnfleet.strategies.temporal.memory import NO_EVENT, MemoryRows, MemoryUpdate, NodeMemory
from gnnfleet.strategies.temporal.schedule import IterationPlan, Schedule

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


MEMORY_PREFIX, CACHED_PREFIX = "memory/", "held/"


BatchBuilder = Callable[[int, int, int, tuple[int, int]], EventBatch]
"""(low, high, number of the pass over the stream, global batch) → events ``low`` to ``high`` of the global batch."""


@dataclass(frozen=True, eq=False)
class WorkItem:
    iteration: int
    plan: IterationPlan
    batch: EventBatch | None = None  # its share; None: idle, or the batch has fewer events than trainers
    memory_ids: Tensor | None = None  # [n] ascending nodes of all uses, if memory is read now


@dataclass(frozen=True, eq=False)
class CachedRead:
    iteration: int
    ids: Tensor
    rows: MemoryRows

    def select(self, nodes: Tensor) -> MemoryRows:
        return self.rows if nodes is self.ids else self.rows.select(torch.searchsorted(self.ids, nodes))


class MemoryScheduler:
    """Collective on construction. ``bounds`` [T + 1] delimit the global batches."""

    def __init__(
        self,
        world: World,
        schedule: Schedule,
        bounds: Sequence[int],
        build_batch: BatchBuilder,
        layout: TableLayout,
        stream: EventStream,
    ) -> None:
        self.schedule, self.bounds, self._build_batch = schedule, bounds, build_batch
        self._rank, self._stream = world.rank, stream
        mesh = Mesh(world, schedule.layout.axes)
        self._share = mesh.coordinates["batch"]
        self.shared = SharedNodeMemory(mesh, layout)
        self._cached: CachedRead | None = None

    def items(self, begin: int, end: int) -> Generator[WorkItem]:
        """Yield the work of iterations ``begin`` to ``end``; may run ahead in a thread."""
        uses: list[EventBatch | None] = []  # remaining uses of the current batch
        for iteration in range(begin, end):
            plan = self.schedule.iteration_plan(self._rank, iteration)
            if plan.is_first or (iteration == begin and self._continues_batch(plan, iteration)):
                uses = self._uses(plan)
            if not uses:  # idle, or memory was not read for a batch that had started before
                yield WorkItem(iteration, IterationPlan(plan.memory_copy, plan.sweep, plan.phase, None))
                continue
            nodes = _union([use.block.nodes for use in uses if use is not None]) if plan.is_first else None
            yield WorkItem(iteration, plan, uses.pop(0), nodes)

    def begin(self, iteration: int) -> None:
        """Collective. Prepare the memory before the first of some iterations.

        A memory that starts within the stream is empty, but has the times of its nodes' last events. Mails need them.
        """
        phase = self.schedule.iteration_plan(self._rank, iteration).phase
        if self.shared.trainers.is_first and 0 < phase < self.schedule.batches:
            tables = self.shared.memory.tables
            if tables["memory"].numel() and bool((tables["mail_event"] == NO_EVENT).all()):
                ids, event, _ = last_events(self._stream, 0, self.bounds[phase])
                tables["memory_event"][ids] = event
        self.shared.begin(iteration)

    def read(self, work: WorkItem) -> MemoryRows | None:
        """Memory rows of the nodes of a work item's block; None without a batch."""
        if work.memory_ids is not None:
            rows = self.shared.read(work.plan, work.iteration, work.memory_ids)
            self._cached = CachedRead(work.iteration, work.memory_ids, rows)
        if work.batch is None:
            return None
        assert self._cached is not None
        return self._cached.select(work.batch.block.nodes)

    def write(self, work: WorkItem, update: MemoryUpdate | None) -> None:
        """Write the memory in iterations that read it; call it in every iteration."""
        if work.plan.is_first:
            self.shared.write(work.iteration, update)

    def state(self) -> dict[str, Tensor]:
        """Live tensors from which this trainer can resume; the first trainer of a memory has its tables."""
        state = {"shape": torch.tensor(list(self.schedule.layout.axes.values()))}
        if self.shared.trainers.is_first:
            state |= {MEMORY_PREFIX + name: table for name, table in self.shared.memory.tables.items()}
        if self._cached is not None and self.schedule.layout.epoch_parallel > 1:
            state[f"{CACHED_PREFIX}iteration"] = torch.tensor(self._cached.iteration)
            state[f"{CACHED_PREFIX}nodes"] = self._cached.ids
            state |= {CACHED_PREFIX + name: rows for name, rows in vars(self._cached.rows).items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``state`` on all ranks before ``begin``; ignored if the layout has changed."""
        if state["shape"].tolist() != list(self.schedule.layout.axes.values()):
            return
        if tables := _without_prefix(MEMORY_PREFIX, state):
            self.shared.memory.load(tables)
        cached = _without_prefix(CACHED_PREFIX, state)
        self._cached = None
        if cached:
            iteration, ids = int(cached.pop("iteration")), cached.pop("nodes")
            rows = MemoryRows(**{name: tensor.clone() for name, tensor in cached.items()})
            self._cached = CachedRead(iteration, ids.clone(), rows)

    def _continues_batch(self, plan: IterationPlan, iteration: int) -> bool:
        return plan.batch is not None and self._cached is not None and self._cached.iteration == iteration - plan.use

    def _uses(self, plan: IterationPlan) -> list[EventBatch | None]:
        """Build this trainer's share of a batch for its present use and those that follow."""
        assert plan.batch is not None
        shares = self.schedule.layout.batch_parallel
        first, end = self.bounds[plan.batch], self.bounds[plan.batch + 1]
        low, high = (first + (end - first) * share // shares for share in (self._share, self._share + 1))
        remaining = self.schedule.layout.epoch_parallel - plan.use
        if low == high:
            return [None] * remaining
        passes = range(plan.pass_number, plan.pass_number + remaining)
        return [self._build_batch(low, high, pass_number, (first, end)) for pass_number in passes]


def _union(nodes: Sequence[Tensor]) -> Tensor:
    if not nodes:
        return torch.empty(0, dtype=torch.int64)
    return nodes[0] if len(nodes) == 1 else torch.unique(torch.cat(list(nodes)))


def _without_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
