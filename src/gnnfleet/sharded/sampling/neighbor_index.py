"""In-edges of a partition for sampling: whole neighbourhoods of local nodes, in store order, with store ids.

A partition keeps edges in blocks by the partition of their source, which is how rows are exchanged. Sampling draws the
k-th in-edge of a node, counted as the store counts. Here, a node's position is its rank among the partition's nodes of
its type by ascending store id. n positions, E edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import RingExchange, RowTable
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.row_index import RowIndex
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks, RelationBlocks, split_block


@dataclass(frozen=True, eq=False)
class InNeighbors:
    """In-edges of one type. Draws return offsets into the edges of all positions."""

    edges: CSR  # rows are positions, columns store ids of sources
    degree: Tensor  # [n] int64
    first: Tensor  # [n] int64: store edge id of each position's first edge; the ids of the others follow
    partition_order: Tensor | None  # [E] int64: where each edge's weight and attr are, if the type has any
    weight: Tensor | None  # in the partition's order
    attr: Tensor | None

    def edge_ids(self, positions: Tensor, offsets: Tensor, drawn: Tensor) -> Tensor:
        """[·] store edge ids of the edges drawn for ``positions``."""
        shift = self.first[positions] - self.edges.indptr[positions]
        return drawn + torch.repeat_interleave(shift, offsets.diff(), output_size=len(drawn))

    def edge_data(self, drawn: Tensor) -> dict[str, Tensor]:
        """Weights and features of drawn edges, as rows."""
        tables = {}
        for name, values in (("weight", self.weight), ("attr", self.attr)):
            if values is not None:
                assert self.partition_order is not None
                tables[name] = gather(values if values.dim() == 2 else values[:, None], self.partition_order[drawn])
        return tables


class LocalNodes:
    """The partition's nodes of one type by position."""

    def __init__(self, store_ids: Tensor) -> None:
        self.ids, self.rows = torch.sort(store_ids)  # [n] store ids; rows of the partition
        self._index = RowIndex(self.ids)

    def positions_of(self, ids: Tensor) -> Tensor:
        """[n] the position of each store id; raises InputError for a node of another partition."""
        return self._index.rows(ids)


def build_in_neighbors(
    blocks: PartitionBlocks, ring: RingExchange, counts: Mapping[str, int]
) -> dict[EdgeType, InNeighbors]:
    """Collective. Neighbours by edge type; ``counts`` has the nodes of each type in the whole graph."""
    sources = {kind: _fetch_source_ids(blocks, ring, kind) for kind in blocks.nodes}
    order = {kind: torch.sort(rows.node_ids).indices for kind, rows in blocks.nodes.items()}
    return {
        kind: _in_neighbors(edges, sources[kind.src], order[kind.dst], counts[kind.src])
        for kind, edges in blocks.edges.items()
    }


def _fetch_source_ids(blocks: PartitionBlocks, ring: RingExchange, kind: str) -> list[Tensor]:
    """By partition, store ids of the source nodes, in the order in which columns of blocks number them."""
    ids_by_rank: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * ring.world.size
    local_ids = blocks.nodes[kind].node_ids.contiguous()

    def on_rows(q: int, received: list[Tensor]) -> None:
        ids_by_rank[q] = local_ids if q == ring.world.rank else received[0][:, 0].clone()

    ring.run([RowTable(blocks.exchange_plan(kind, "in"), local_ids[:, None])], on_rows, op="ids of neighbours")
    return ids_by_rank


def _in_neighbors(edges: RelationBlocks, sources: list[Tensor], order: Tensor, count: int) -> InNeighbors:
    index_dtype = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    degree = edges.degree(self_loops=False)[order]
    indptr = torch.zeros(len(order) + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=indptr[1:])
    # The in-edges of a node have consecutive store ids: the first id tells where any other goes.
    first = torch.full((len(order),), torch.iinfo(torch.int64).max)
    for block in edges.in_blocks:
        for rows, piece in split_block(block):
            first.scatter_reduce_(0, position[rows], block.edge_ids[piece], "amin")
    has_data = edges.weight is not None or edges.attr is not None
    col = torch.empty(int(indptr[-1]), dtype=index_dtype)
    partition_order = torch.empty(len(col), dtype=torch.int64) if has_data else None
    for block, source_ids in zip(edges.in_blocks, sources, strict=True):
        col_ids = source_ids.to(index_dtype)
        for rows, piece in split_block(block):
            at = position[rows]
            at = block.edge_ids[piece] - first[at] + indptr[at]
            col[at] = col_ids[block.structure.col[piece].long()]
            if partition_order is not None:
                partition_order[at] = torch.arange(block.edges.start + piece.start, block.edges.start + piece.stop)
    first[degree == 0] = 0
    return InNeighbors(CSR(indptr, col, count), degree, first, partition_order, edges.weight, edges.attr)
