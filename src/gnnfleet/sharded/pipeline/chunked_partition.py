"""The rows and edges of one graph-parallel partition, cut into chunks as kernels take them.

Rows are numbered by position in the layout, from 0. Halo rows follow: rows of other partitions at the far end of an
edge, by position. In-edges have other halo rows (sources) than out-edges (destinations). The edges of a chunk are in
two blocks: those within the chunk, and those to or from remote rows, which are all rows outside of it.
n rows of the partition, m halo rows of a direction, r rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.graph import Edges, EdgeType, Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.partition.shard import DIRECTIONS, HaloPlan, ShardBlock, ShardNodes
from gnnfleet.graph.views.local import graph_degrees
from gnnfleet.graph.views.view_base import Degrees
from gnnfleet.ops.csr import counting_sort, offsets_of
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks

LOCAL, REMOTE = 0, 1
"""The two blocks of a chunk."""


@dataclass(frozen=True, eq=False)
class _RowEdges:
    """Edges of one type and direction, by row of the partition."""

    indptr: Tensor  # [n + 1] int64
    col: Tensor  # [E] row or halo row at the far end (int32), or its position (int64)
    edge_ids: Tensor  # [E] int64


@dataclass(frozen=True, eq=False)
class ChunkExchangePlan(ExchangePlan):
    direction: str = "in"


class ChunkedPartition:
    """One partition of a layout, built in one pass over the edges of the store."""

    def __init__(self, graph: Graph, layout: ChunkLayout, number: int) -> None:
        self.graph, self.layout, self.number = graph, layout, number
        (self.node_type,) = graph.nodes
        self.low, self.high = layout.partition_range(number)
        self.rows = self.high - self.low
        self.halo: dict[str, Tensor] = {}  # [m] int64: positions of the halo rows of a direction, ascending
        self.edges: dict[tuple[EdgeType, str], _RowEdges] = {}
        for direction in DIRECTIONS:
            edges = {kind: self._local_edges(table, direction) for kind, table in graph.edges.items()}
            outside = [table.col[~self._contains(table.col)] for table in edges.values()]
            self.halo[direction] = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *outside]))
            for kind, table in edges.items():
                columns = self._columns(table.col, direction)
                self.edges[kind, direction] = _RowEdges(table.indptr, columns, table.edge_ids)

    def _contains(self, positions: Tensor) -> Tensor:
        return (positions >= self.low) & (positions < self.high)

    def _local_edges(self, edges: Edges, direction: str) -> _RowEdges:
        """The edges of this partition's rows; columns are positions."""
        position = self.layout.position
        src, dst = position[edges.src.long()], position[edges.dst().long()]
        rows, columns = (dst, src) if direction == "in" else (src, dst)
        local = self._contains(rows).nonzero()[:, 0]
        indptr, order = counting_sort(rows[local] - self.low, self.rows)
        edge_ids = local[order]
        return _RowEdges(indptr, columns[edge_ids], edge_ids)

    def _columns(self, positions: Tensor, direction: str) -> Tensor:
        halo_rows = torch.searchsorted(self.halo[direction], positions) + self.rows
        return torch.where(self._contains(positions), positions - self.low, halo_rows).int()

    def num_rows_with_halo(self, direction: str) -> int:
        return self.rows + len(self.halo[direction])

    @cached_property
    def degree(self) -> Degrees:
        """Numbers of all nodes of the graph by store id, which need no exchange."""
        return graph_degrees(self.graph, self.node_type)

    @property
    def store_ids(self) -> Tensor:
        return self.layout.order[self.low : self.high]

    @cached_property
    def chunks(self) -> list[Chunk]:
        per_partition = self.layout.chunks_per_partition
        ranges = [self.layout.chunk_range(self.number * per_partition + number) for number in range(per_partition)]
        return [Chunk(self, low - self.low, high - self.low, number) for number, (low, high) in enumerate(ranges)]

    @cached_property
    def as_one_chunk(self) -> Chunk:
        """All rows; the remote rows are the halo."""
        return self.chunks[0] if self.layout.chunks_per_partition == 1 else Chunk(self, 0, self.rows, -1)


class Chunk:
    """Rows ``low`` to ``high`` of a partition; a ``BlockSource``. Its number is negative if it is not of the layout."""

    part, parts = LOCAL, 2

    def __init__(self, partition: ChunkedPartition, low: int, high: int, number: int) -> None:
        self.partition, self.low, self.high, self.number = partition, low, high, number
        self.rows, self.span = high - low, slice(low, high)
        self.node_types: tuple[str, ...] = (partition.node_type,)
        self.edge_types: tuple[EdgeType, ...] = tuple(partition.graph.edges)
        self._remote_rows: dict[str, Tensor | None] = {}

    def nodes(self, node_type: str) -> ShardNodes:
        return ShardNodes(store_ids=self.partition.store_ids[self.span])

    def remote_rows(self, direction: str) -> Tensor | None:
        """[·] int64: rows and halo rows that edges of this chunk lead to, ascending; None if these are most rows.

        Exchanges then hand over the whole table instead of selecting rows.
        """
        if direction not in self._remote_rows:
            mask = torch.zeros(self.partition.num_rows_with_halo(direction), dtype=torch.bool)
            for kind in self.edge_types:
                mask[self._columns(kind, direction).long()] = True
            mask[self.span] = False
            rows = mask.nonzero()[:, 0]
            self._remote_rows[direction] = None if 2 * len(rows) >= len(mask) else rows
        return self._remote_rows[direction]

    @cached_property
    def fetched_ids(self) -> Tensor:
        """Store ids of the chunk's rows and of the remote rows that its in-edges lead to."""
        partition, remote = self.partition, self.remote_rows("in")
        halo_ids = partition.layout.order[partition.halo["in"]]
        ids = torch.cat([partition.store_ids, halo_ids])
        return torch.cat([ids[self.span], ids if remote is None else ids[remote]])

    def reads_remote(self, direction: str) -> bool:
        rows = self.remote_rows(direction)
        return self.partition.num_rows_with_halo(direction) > self.rows if rows is None else bool(len(rows))

    def _columns(self, kind: EdgeType, direction: str) -> Tensor:
        edges = self.partition.edges[kind, direction]
        return edges.col[int(edges.indptr[self.low]) : int(edges.indptr[self.high])]

    def plan(self, node_type: str, direction: str) -> HaloPlan:
        remote, none = self.remote_rows(direction), torch.empty(0, dtype=torch.int32)
        if remote is None:
            remote = torch.arange(self.partition.num_rows_with_halo(direction))
        # Gradients return to all rows.
        return HaloPlan(recv=(none, remote.int()), send=(none, torch.arange(self.rows, dtype=torch.int32)))

    def block(self, edge_type: EdgeType, direction: str, q: int) -> ShardBlock:
        positions, edge_rows = self._block_edges(edge_type, direction, q)
        edges, table = self.partition.edges[edge_type, direction], self.partition.graph.edges[edge_type]
        cols = edges.col[positions]
        if q == LOCAL:
            cols = cols - self.low
        elif (remote := self.remote_rows(direction)) is not None:
            cols = torch.searchsorted(remote, cols.long()).int()
        rows, counts = torch.unique_consecutive(edge_rows, return_counts=True)
        edge_ids = edges.edge_ids[positions]
        data = {} if table.weight is None else {"weight": table.weight[edge_ids]}
        return ShardBlock(rows=rows.int(), indptr=offsets_of(counts), cols=cols, edge_ids=edge_ids, data=data)

    def _block_edges(self, edge_type: EdgeType, direction: str, q: int) -> tuple[Tensor, Tensor]:
        """(positions among the partition's edges, row of each edge) of a block."""
        indptr = self.partition.edges[edge_type, direction].indptr[self.low : self.high + 1]
        rows = torch.repeat_interleave(torch.arange(self.rows), indptr.diff())
        cols = self._columns(edge_type, direction)
        is_local = (cols >= self.low) & (cols < self.high)
        selected = (is_local if q == LOCAL else ~is_local).nonzero()[:, 0]
        return selected + int(indptr[0]), rows[selected]

    def edge_data(self, edge_type: EdgeType, name: str) -> Tensor | None:
        edges = self.partition.edges[edge_type, "in"]
        ids = torch.cat([edges.edge_ids[self._block_edges(edge_type, "in", q)[0]] for q in (LOCAL, REMOTE)])
        if name == "edge_ids":
            return ids
        values: Tensor | None = getattr(self.partition.graph.edges[edge_type], name)
        return None if values is None else values[ids]


class ChunkBlocks(PartitionBlocks):
    def exchange_plan(self, kind: str, direction: str) -> ChunkExchangePlan:
        plan = super().exchange_plan(kind, direction)
        return ChunkExchangePlan(plan.send_rows, plan.recv_counts, direction)


def slot_of_position(orders: Sequence[Sequence[int]], layout: ChunkLayout) -> Tensor:
    """[N] int64: the slot in which each position is computed, given the order of every partition's chunks."""
    slots = torch.empty(len(layout.order), dtype=torch.int64)
    for partition, order in enumerate(orders):
        for slot, chunk in enumerate(order):
            slots[slice(*layout.chunk_range(partition * layout.chunks_per_partition + chunk))] = slot
    return slots
