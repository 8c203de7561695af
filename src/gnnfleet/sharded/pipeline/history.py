"""Historical embeddings and gradients of a partition, whose chunks are computed one after the other.

*Forward.* Each verb of a layer has a table of its source rows. A chunk writes its rows to it and reads those of its
neighbours: fresh rows of earlier chunks of this pass, historical ones of later chunks. *Backward* visits the chunks in
reverse order: chunks that read a fresh row come before the chunk of that row. Edges that read a historical row have no
gradient yet; the gradient rule says what counts instead. For an edge between chunks, with the gradient g of this pass
and o of the previous pass:

    double   fresh 2 g   historical 0     the mean over random orders is g, for one hop
    stale    fresh g     historical o

Edges within a chunk count once, with g, and so do edges between chunks of different partitions in the same slot.
Backward undoes the writes of forward chunk by chunk, so that a chunk reads the same rows in both. After the pass the
tables hold the history again, or the rows of this pass if it updates the history.
n rows of the partition, m halo rows of a direction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import FetchedRows, OnReturns, OnRows, ReturnPath, RowTable
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.full_batch.grad_exchange import add_rows
from gnnfleet.sharded.full_batch.partitioned_view import PartitionedView
from gnnfleet.sharded.pipeline.chunked_partition import (
    LOCAL,
    REMOTE,
    Chunk,
    ChunkBlocks,
    ChunkedPartition,
    ChunkExchangePlan,
)
from gnnfleet.sharded.pipeline.stage_halo import Rows, StageHalo

GradientRule = Literal["double", "stale"]

HistoryKey = tuple[int, int, int]
"""Layer, number of the verb in it, number of the table of the verb."""

_SavedRows = tuple[HistoryKey, Rows, Tensor]

_MISSING = 1e30
"""Value of columns that the output is not proportional to, in missing rows: their other columns are 0."""


@dataclass(frozen=True)
class PipelineSlot:
    """The chunks that the partitions compute at the same time; −1 is a partition as one chunk."""

    slot: int
    chunks: tuple[int, ...]


@dataclass(eq=False)
class _DestinationGrads:
    """Gradients of the destinations of a verb during a backward pass; all tables are [n + m, F]."""

    rule: GradientRule
    linear: int  # sources' gradients are proportional to the columns from here on
    current: Tensor  # corrected by the rule
    # Of the previous pass. It is ``current`` if sources' gradients are proportional to all columns: then both can be
    # added up.
    previous: Tensor | None
    latest: Tensor | None  # of this pass, not corrected

    def set_same_slot(self, rows: Rows, grads: Tensor) -> None:
        """Set halo rows of this slot, which count once and without the previous pass."""
        if self.previous is not None:
            self.previous[rows, self.linear :] = 0
        self.current[rows] = grads

    def set_corrected(self, rows: Rows, grads: Tensor) -> None:
        """Set rows of a slot that is finished."""
        self.set_same_slot(rows, grads)
        self.current[rows, self.linear :] = _corrected(self.rule, grads[:, self.linear :])
        if self.latest is not None:
            self.latest[rows] = grads


def _corrected(rule: GradientRule, grads: Tensor) -> Tensor:
    """Gradients of edges that read fresh rows."""
    return 2 * grads if rule == "double" else grads


@dataclass(eq=False)
class _Pass:
    """State of one forward and backward over all chunks."""

    slots: Tensor  # [n + m] the slot of each row and halo row of sources
    updates_history: bool  # rows of this pass replace the history
    num_verbs: Counter[tuple[int, int]] = field(default_factory=Counter)  # so far, by slot and layer
    overwritten: dict[int, list[_SavedRows]] = field(default_factory=lambda: defaultdict(list))  # by slot
    fresh: list[_SavedRows] = field(default_factory=list)
    destination_grads: dict[HistoryKey, _DestinationGrads] = field(default_factory=dict)
    source_grads: dict[HistoryKey, Tensor] = field(default_factory=dict)  # [n + m, F], summed until fetched
    remote_grads: dict[tuple[HistoryKey, int], Tensor] = field(default_factory=dict)  # by chunk: of its remote rows


class HistoryStore:
    """The tables of a partition in a stage. A disabled store keeps no rows after a verb."""

    def __init__(
        self, partition: ChunkedPartition, halo: StageHalo, rule: GradientRule = "double", *, is_enabled: bool = True
    ) -> None:
        self.partition, self.halo, self.rule, self.is_enabled = partition, halo, rule, is_enabled
        self._keeps_grads = is_enabled and rule != "double"
        self.rows: dict[HistoryKey, Tensor] = {}  # [n + m, F]
        # Gradients of the previous pass: of destinations, and of the remote rows of each chunk.
        self.destination_grads: dict[HistoryKey, Tensor] = {}
        self.remote_grads: dict[tuple[HistoryKey, int], Tensor] = {}
        self._pass = _Pass(torch.empty(0), updates_history=False)

    def begin(self, slots: Tensor | None = None, *, updates_history: bool = False) -> None:
        """Begin a pass; ``slots`` [N] has the slot of each position of the layout, by default 0."""
        if slots is None:
            slots = torch.zeros(len(self.partition.layout.order), dtype=torch.int64)
        local = slots[self.partition.low : self.partition.high]
        self._pass = _Pass(torch.cat([local, slots[self.partition.halo["in"]]]), updates_history)

    def new_exchange(self, chunk: Chunk, slot: PipelineSlot, layer: int) -> ChunkExchange:
        """The exchange of the next verb of a layer."""
        number = self._pass.num_verbs[slot.slot, layer]
        self._pass.num_verbs[slot.slot, layer] += 1
        return ChunkExchange(self, chunk, slot, layer, number)

    # -- source rows --

    def table(self, key: HistoryKey, like: Tensor) -> Tensor:
        """The source rows of a verb, zeros at first."""
        shape = self.partition.num_rows_with_halo("in"), like.shape[1]
        if not self.is_enabled:
            return like.new_empty(shape)
        if key not in self.rows:
            self.rows[key] = like.new_zeros(shape)
        return self.rows[key]

    def write(self, key: HistoryKey, slot: int, table: Tensor, rows: Rows, values: Tensor) -> None:
        if self.is_enabled:
            self._pass.overwritten[slot].append((key, rows, table[rows].clone()))
        table[rows] = values

    def restore(self, slot: int) -> None:
        """Undo the writes of a slot, after its backward."""
        for key, rows, old in self._pass.overwritten.pop(slot, ()):
            table = self.rows[key]
            if self._pass.updates_history:
                self._pass.fresh.append((key, rows, table[rows].clone()))
            table[rows] = old

    def finish(self) -> None:
        """End the pass. If it updates the history, rows of slots without a backward are kept as well."""
        done = self._pass
        for key, rows, values in done.fresh:
            self.rows[key][rows] = values
        if not done.updates_history:
            for slot in list(done.overwritten):
                self.restore(slot)
        latest = {key: grads.latest for key, grads in done.destination_grads.items() if grads.latest is not None}
        self.destination_grads = latest or self.destination_grads
        self.remote_grads = done.remote_grads or self.remote_grads
        self._pass = _Pass(torch.empty(0), updates_history=False)

    # -- gradients --

    def begin_destination_grads(self, key: HistoryKey, table: RowTable, *, is_shared: bool) -> _DestinationGrads:
        """The gradients of a verb's destinations; ``is_shared`` puts both passes into one table."""
        tables = self._pass.destination_grads
        if key not in tables:
            stored = self.destination_grads.get(key)
            current = table.rows.new_zeros(self.partition.num_rows_with_halo("out"), table.rows.shape[1])
            latest = torch.zeros_like(current) if self._keeps_grads else None
            current[:, : table.linear] = _MISSING
            if is_shared and stored is not None:
                current.copy_(stored)
            previous = current if is_shared else None if stored is None else stored.clone()
            tables[key] = _DestinationGrads(self.rule, table.linear, current, previous, latest)
        return tables[key]

    def source_grads(self, key: HistoryKey, path: ReturnPath) -> Tensor:
        """[n + m, F]: sums of the gradients that chunks return to source rows.

        They begin with those of the previous pass, for chunks that read historical rows.
        """
        tables = self._pass.source_grads
        if key not in tables:
            tables[key] = torch.zeros(self.partition.num_rows_with_halo("in"), path.width, dtype=path.dtype)
            for (stored_key, number), grads in self.remote_grads.items():
                if stored_key == key:
                    chunk = self.partition.chunks[number]
                    rows, slots = self._remote_slots(chunk)
                    is_historical = slots > (int(self._pass.slots[chunk.low]) if chunk.rows else 0)
                    add_rows(tables[key], rows[is_historical], grads[is_historical])
        return tables[key]

    def add_remote_grads(self, key: HistoryKey, chunk: Chunk, slot: int, table: Tensor, grads: Tensor) -> None:
        """Add the gradients of a chunk's remote rows to the sums of their sources."""
        rows, slots = self._remote_slots(chunk)
        same, earlier = slots == slot, slots < slot
        add_rows(table, rows[same], grads[same])
        add_rows(table, rows[earlier], _corrected(self.rule, grads[earlier]))
        if self._keeps_grads and chunk.number >= 0:
            self._pass.remote_grads[key, chunk.number] = grads.clone()

    def _remote_slots(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """(rows that a chunk reads as remote, slot of each); the chunk's own rows have a slot after all others."""
        remote, slots = chunk.remote_rows("in"), self._pass.slots
        if remote is not None:
            return remote, slots[remote]
        slots = slots.clone()
        slots[chunk.span] = torch.iinfo(torch.int64).max
        return torch.arange(len(slots)), slots

    def row_bytes(self) -> tuple[int, int, int]:
        """Bytes of a row on the wire in this pass: of sources, of destinations in backward, of returned gradients."""
        bytes_of, done = self.halo.codec.row_bytes, self._pass
        destinations = [grads.current for grads in done.destination_grads.values()]
        returned = done.source_grads.values()
        return sum(map(bytes_of, self.rows.values())), sum(map(bytes_of, destinations)), sum(map(bytes_of, returned))

    # -- checkpoints --

    def state_dict(self) -> dict[str, Tensor]:
        return {
            **{f"history/{_key_name(key)}": table for key, table in self.rows.items()},
            **{f"gradient/{_key_name(key)}": table for key, table in self.destination_grads.items()},
            **{f"pulled/{_key_name(key)}/{chunk}": grads for (key, chunk), grads in self.remote_grads.items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rows, self.destination_grads, self.remote_grads = {}, {}, {}
        for name, tensor in state.items():
            kind, key_name, *chunk = name.split("/")
            layer, verb, table = map(int, key_name.split("."))
            if kind == "history":
                self.rows[layer, verb, table] = tensor.clone()
            elif kind == "gradient" and self._keeps_grads:
                self.destination_grads[layer, verb, table] = tensor.clone()
            elif self._keeps_grads:
                self.remote_grads[(layer, verb, table), int(chunk[0])] = tensor.clone()


@dataclass(eq=False)
class ChunkExchange:
    """The rows that one verb of a chunk reads: a forward, then at most one backward."""

    history: HistoryStore
    chunk: Chunk
    slot: PipelineSlot
    layer: int
    number: int
    is_backward: bool = False

    @property
    def local_block(self) -> int:
        return LOCAL

    def run(
        self,
        tables: Sequence[RowTable],
        on_rows: OnRows,
        *,
        returns: Sequence[ReturnPath] = (),
        on_returns: OnReturns | None = None,
        fetched: FetchedRows | None = None,
        op: str = "rows",
    ) -> None:
        """Hand over the chunk's own rows, then its remote rows; see ``RingExchange.run``."""
        assert fetched is None, "rows stay in the tables"
        if not self.is_backward:
            self.is_backward = True
            self._forward(tables, on_rows, op)
        elif tables and isinstance(tables[0].plan, ChunkExchangePlan) and tables[0].plan.direction == "out":
            self._backward_by_source(tables, on_rows, op)
        else:
            local, remote = self._backward_by_destination(tables, on_rows, returns, op)
            if on_returns is not None and returns:
                on_returns(LOCAL, local)
                on_returns(REMOTE, remote)

    def _key(self, table: int) -> HistoryKey:
        return self.layer, self.number, table

    def _remote(self, direction: str, tables: Sequence[Tensor]) -> list[Tensor]:
        rows = self.chunk.remote_rows(direction)
        return [table if rows is None else gather(table, rows) for table in tables]

    def _forward(self, tables: Sequence[RowTable], on_rows: OnRows, op: str) -> None:
        history, chunk, own_rows = self.history, self.chunk, [table.rows for table in tables]
        swap = history.halo.send_rows("in", chunk, self.slot.chunks, own_rows, op)
        on_rows(LOCAL, own_rows)
        received = swap.wait()
        if not history.is_enabled and not chunk.reads_remote("in"):
            return
        sources = [history.table(self._key(index), rows) for index, rows in enumerate(own_rows)]
        for rows, values in [*received, (chunk.span, own_rows)]:
            for index, (source, value) in enumerate(zip(sources, values, strict=True)):
                history.write(self._key(index), self.slot.slot, source, rows, value)
        if chunk.reads_remote("in"):
            on_rows(REMOTE, self._remote("in", sources))

    def _backward_by_source(self, tables: Sequence[RowTable], on_rows: OnRows, op: str) -> None:
        """Compute gradients of this chunk's sources from those of their destinations in all chunks."""
        history, chunk, own_rows = self.history, self.chunk, [table.rows for table in tables]
        swap = history.halo.send_rows("out", chunk, self.slot.chunks, own_rows, op)
        on_rows(LOCAL, own_rows)
        received = swap.wait()
        if not history.is_enabled and not chunk.reads_remote("out"):
            return
        is_shared = not any(table.linear for table in tables)
        grads = [
            history.begin_destination_grads(self._key(index), table, is_shared=is_shared)
            for index, table in enumerate(tables)
        ]
        for rows, values in received:
            for table, value in zip(grads, values, strict=True):
                table.set_same_slot(rows, value)
        if chunk.reads_remote("out"):
            on_rows(REMOTE, self._remote("out", [table.current for table in grads]))
            previous = [table.previous for table in grads if table.previous is not None]
            if not is_shared and len(previous) == len(grads):
                on_rows(REMOTE, self._remote("out", previous))
        for rows, values in [*received, (chunk.span, own_rows)]:
            for table, value in zip(grads, values, strict=True):
                table.set_corrected(rows, value)

    def _backward_by_destination(
        self, tables: Sequence[RowTable], on_rows: OnRows, returns: Sequence[ReturnPath], op: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hand over the sources of forward again, and return their gradients to their chunks.

        Returns the gradients of this chunk's sources: those of its own edges, and those of other chunks.
        """
        history, chunk = self.history, self.chunk
        local = on_rows(LOCAL, [table.rows for table in tables])
        grads = [history.source_grads(self._key(index), path) for index, path in enumerate(returns)]
        if chunk.reads_remote("in"):
            sources = [history.rows[self._key(index)] for index in range(len(tables))]
            remote = on_rows(REMOTE, self._remote("in", sources))
            for index, (table, values) in enumerate(zip(grads, remote or (), strict=True)):
                history.add_remote_grads(self._key(index), chunk, self.slot.slot, table, values.to(table.dtype))
        for rows, returned in history.halo.return_grads(chunk, self.slot.chunks, grads, op).wait():
            assert isinstance(rows, Tensor)
            for table, values in zip(grads, returned, strict=True):
                add_rows(table, rows, values)
        return list(local or ()), [table[chunk.span] for table in grads]


def _key_name(key: HistoryKey) -> str:
    return ".".join(map(str, key))


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkView(PartitionedView):
    """A chunk in a slot of the pipeline."""

    chunk: Chunk
    history: HistoryStore
    slot: PipelineSlot

    @classmethod
    def open(cls, chunk: Chunk, history: HistoryStore) -> ChunkView:
        blocks = ChunkBlocks(chunk)
        return cls(
            blocks=blocks,
            nodes=blocks.nodes,
            relations=blocks.edges,
            chunk=chunk,
            history=history,
            slot=PipelineSlot(0, (-1,) * history.halo.world.size),
        )

    def in_slot(self, slot: PipelineSlot, history: HistoryStore | None = None) -> ChunkView:
        """The view of the same chunk in another slot, and with another history if one is given."""
        return replace(self, slot=slot, history=history or self.history)

    def _exchange(self) -> ChunkExchange:
        return self.history.new_exchange(self.chunk, self.slot, self.layer)

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        partition, ids = self.chunk.partition, self.chunk.fetched_ids
        return replace(super().edge_list(edge_type), fetched_degree=lambda kind: partition.degree(kind)[ids])

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        raise ConfigError("strategy pipe gathers rows of other chunks for the loss only, not in layers: use sar")

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        if self.chunk.rows != self.chunk.partition.rows:
            raise ConfigError("this layer needs all nodes at once, a chunk has only some: set strategy.chunks=1")
        return sum_over_ranks(self.history.halo.world, t)
