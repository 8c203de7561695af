"""The rows of one way and the edges at them, cut into chunks as kernels take them.

Rows of a way are numbered by place, from 0; after them come mirrors: rows of other ways at the far end of an edge here,
in the order of their places. In-edges have other mirrors (sources) than out-edges (destinations). A chunk is to its way
what a part is to a graph: its edges are in two blocks, those from or to rows of its own and those of the rest.
n rows of the way, m mirrors of a direction, r rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.partition.shard import DIRECTIONS, HaloPlan, ShardBlock, ShardNodes
from gnnfleet.ops.csr import counting_sort
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks

LOCAL, REMOTE = 0, 1
"""The two blocks of a chunk."""


@dataclass(frozen=True, eq=False)
class _RowEdges:
    """Edges of one type and direction, by row of the way."""

    indptr: Tensor  # [n + 1] int64
    col: Tensor  # [E] int32: row or mirror at the far end
    edge_ids: Tensor  # [E] int64


@dataclass(frozen=True, eq=False)
class ChunkExchangePlan(ExchangePlan):
    """What a chunk reads of the rest of its way."""

    direction: str = "in"
    remote_rows: Tensor | None = None  # [·] int64: rows and mirrors, ascending; None: all of them


class ChunkedPartition:
    """The rows of one way; made from the store's edges, one pass over all of them."""

    def __init__(self, graph: Graph, layout: ChunkLayout, number: int) -> None:
        self.graph, self.layout, self.number = graph, layout, number
        (self.kind,) = graph.nodes
        self.low, self.high = layout.partition_range(number)
        far: dict[str, list[Tensor]] = {direction: [] for direction in DIRECTIONS}
        found: dict[str, dict[EdgeType, tuple[Tensor, Tensor, Tensor]]] = {direction: {} for direction in DIRECTIONS}
        for kind, edges in graph.edges.items():
            for direction in DIRECTIONS:
                found[direction][kind] = self._edges(edges, direction)
                places = found[direction][kind][1]
                far[direction].append(torch.unique(places[(places < self.low) | (places >= self.high)]))
        # Places of the mirrors, ascending.
        self.halo = {
            direction: torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *lists]))
            for direction, lists in far.items()
        }
        self._ends = {
            direction: {kind: self._numbered(direction, *ends) for kind, ends in kinds.items()}
            for direction, kinds in found.items()
        }

    @property
    def rows(self) -> int:
        return self.high - self.low

    def num_rows_with_halo(self, direction: str) -> int:
        """Rows and mirrors."""
        return self.rows + len(self.halo[direction])

    def _edges(self, edges: Edges, direction: str) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr, [E] the place at the far end, [E] store edge ids) by row of this way."""
        place = self.layout.position
        src, dst = place[edges.src.long()], place[edges.dst().long()]
        near, far = (dst, src) if direction == "in" else (src, dst)
        here = ((near >= self.low) & (near < self.high)).nonzero()[:, 0]
        indptr, order = counting_sort(near[here] - self.low, self.rows)
        ids = here[order]
        return indptr, far[ids], ids

    def _numbered(self, direction: str, indptr: Tensor, places: Tensor, edge_ids: Tensor) -> _RowEdges:
        inside = (places >= self.low) & (places < self.high)
        mirror = torch.searchsorted(self.halo[direction], places) + self.rows
        return _RowEdges(indptr, torch.where(inside, places - self.low, mirror).int(), edge_ids)

    @cached_property
    def chunks(self) -> list[Chunk]:
        first = self.number * self.layout.chunks_per_partition
        spans = [self.layout.chunk_range(first + slot) for slot in range(self.layout.chunks_per_partition)]
        return [self.new_chunk(low - self.low, high - self.low, slot) for slot, (low, high) in enumerate(spans)]

    @cached_property
    def as_one_chunk(self) -> Chunk:
        """All rows as one chunk, whose rest are the mirrors."""
        return self.chunks[0] if self.layout.chunks_per_partition == 1 else self.new_chunk(0, self.rows, -1)

    def new_chunk(self, low: int, high: int, number: int) -> Chunk:
        return Chunk(self, low, high, number)

    def edges(self, kind: EdgeType, direction: str) -> _RowEdges:
        return self._ends[direction][kind]


class Chunk:
    """Rows ``low`` to ``high`` of a way; what a ``PartitionBlocks`` is read from (see ``sharded.part.Cutting``)."""

    part, parts = LOCAL, 2

    def __init__(self, way: ChunkedPartition, low: int, high: int, number: int) -> None:
        self.partition, self.low, self.high, self.number = way, low, high, number
        self.node_types: tuple[str, ...] = (way.kind,)
        self.edge_types: tuple[EdgeType, ...] = tuple(way.graph.edges)

    @property
    def rows(self) -> int:
        return self.high - self.low

    @property
    def span(self) -> slice:
        return slice(self.low, self.high)

    @cached_property
    def store_ids(self) -> Tensor:
        return self.partition.layout.order[self.partition.low + self.low : self.partition.low + self.high]

    def nodes(self, node_type: str) -> ShardNodes:
        return ShardNodes(store_ids=self.store_ids)

    def remote_rows(self, direction: str) -> Tensor | None:
        """Rows and mirrors that edges of this chunk lead to, ascending; None where that is most of them: then all are
        handed over as they lie, instead of picked."""
        if direction not in self._rest:
            mark = torch.zeros(self.partition.num_rows_with_halo(direction), dtype=torch.bool)
            for kind in self.edge_types:
                mark[self._cols(kind, direction).long()] = True
            mark[self.span] = False
            found = mark.nonzero()[:, 0]
            self._rest[direction] = None if 2 * len(found) >= len(mark) else found
        return self._rest[direction]

    def reads(self, direction: str) -> bool:
        """Whether an edge leads to the rest of the way."""
        rest = self.remote_rows(direction)
        return self.partition.num_rows_with_halo(direction) > self.rows if rest is None else bool(len(rest))

    @cached_property
    def _rest(self) -> dict[str, Tensor | None]:
        return {}

    def _cols(self, kind: EdgeType, direction: str) -> Tensor:
        ends = self.partition.edges(kind, direction)
        return ends.col[int(ends.indptr[self.low]) : int(ends.indptr[self.high])]

    def plan(self, node_type: str, direction: str) -> HaloPlan:
        rest, none = self.remote_rows(direction), torch.empty(0, dtype=torch.int32)
        every = torch.arange(self.partition.num_rows_with_halo(direction)) if rest is None else rest
        # Whatever comes home comes to all rows.
        return HaloPlan(recv=(none, every.int()), send=(none, torch.arange(self.rows, dtype=torch.int32)))

    def exchange_plan(self, direction: str) -> ChunkExchangePlan:
        plan = self.plan(self.partition.kind, direction)
        return ChunkExchangePlan(
            plan.send, tuple(len(rows) for rows in plan.recv), direction, self.remote_rows(direction)
        )

    def block(self, edge_type: EdgeType, direction: str, q: int) -> ShardBlock:
        positions, row = self._block_edges(edge_type, direction, q)
        ends, edges = self.partition.edges(edge_type, direction), self.partition.graph.edges[edge_type]
        cols = ends.col[positions]
        if q == LOCAL:
            cols = cols - self.low
        elif (rest := self.remote_rows(direction)) is not None:
            cols = torch.searchsorted(rest, cols.long()).int()
        rows, counts = torch.unique_consecutive(row, return_counts=True)
        indptr = torch.zeros(len(rows) + 1, dtype=torch.int64)
        indptr[1:] = counts.cumsum(0)
        ids = ends.edge_ids[positions]
        data = {} if edges.weight is None else {"weight": edges.weight[ids]}
        return ShardBlock(rows=rows.int(), indptr=indptr, cols=cols, edge_ids=ids, data=data)

    def _block_edges(self, edge_type: EdgeType, direction: str, q: int) -> tuple[Tensor, Tensor]:
        """(positions among the way's edges, the row of each) of one block."""
        ends = self.partition.edges(edge_type, direction)
        indptr = ends.indptr[self.low : self.high + 1]
        row = torch.repeat_interleave(torch.arange(self.rows), indptr.diff())
        cols = self._cols(edge_type, direction)
        own = (cols >= self.low) & (cols < self.high)
        inside = (own if q == LOCAL else ~own).nonzero()[:, 0]
        return inside + int(indptr[0]), row[inside]

    def edge_data(self, edge_type: EdgeType, name: str) -> Tensor | None:
        edges = self.partition.graph.edges[edge_type]
        ends = self.partition.edges(edge_type, "in")
        ids = torch.cat([ends.edge_ids[self._block_edges(edge_type, "in", q)[0]] for q in (LOCAL, REMOTE)])
        if name == "edge_ids":
            return ids
        table: Tensor | None = getattr(edges, name)
        return None if table is None else table[ids]


@dataclass(eq=False)
class ChunkBlocks(PartitionBlocks):
    """A chunk as a part whose rows go to and come from the rest of its way."""

    chunk: Chunk
    _known: dict[str, ChunkExchangePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.chunk)

    def exchange_plan(self, kind: str, direction: str) -> ChunkExchangePlan:
        if direction not in self._known:
            self._known[direction] = self.chunk.exchange_plan(direction)
        return self._known[direction]


def slot_of_position(ways: Sequence[Sequence[int]], layout: ChunkLayout) -> Tensor:
    """[N] int64: the slot in which the rows at each place are worked on, given the order of every way's chunks."""
    found = torch.empty(len(layout.order), dtype=torch.int64)
    for way, order in enumerate(ways):
        for slot, chunk in enumerate(order):
            low, high = layout.chunk_range(way * layout.chunks_per_partition + chunk)
            found[low:high] = slot
    return found
