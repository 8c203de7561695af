"""The in-edges of a part as sampling needs them: whole neighbourhoods of own nodes, in store order, with store ids.

A part keeps edges cut by the part of their source, which is how rows travel. A draw picks the k-th in-edge of a node,
counted as the store counts. Places number the part's nodes of a type by ascending store id. n places, E edges.
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
    """In-edges of one type."""

    edges: CSR  # rows are places, columns store ids of sources
    degree: Tensor  # [n] int64
    first: Tensor  # [n] int64: store edge id of each row's first edge; the others follow
    source_places: Tensor | None  # [E] int64: positions in the part's own order, where edges have weights or features
    weight: Tensor | None  # in the part's order
    attr: Tensor | None

    def edge_ids(self, places: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        """[·] store edge ids of drawn edges."""
        shift = self.first[places] - self.edges.indptr[places]
        return positions + torch.repeat_interleave(shift, offsets.diff(), output_size=len(positions))

    def data(self, positions: Tensor) -> dict[str, Tensor]:
        """Weights and features of drawn edges, as rows."""
        found = {}
        for name, values in (("weight", self.weight), ("attr", self.attr)):
            if values is not None:
                assert self.source_places is not None
                found[name] = gather(values if values.dim() == 2 else values[:, None], self.source_places[positions])
        return found


class OwnNodes:
    """The part's nodes of one type by place."""

    def __init__(self, store_ids: Tensor) -> None:
        self.ids, self.rows = torch.sort(store_ids)  # [n] store ids; rows of the part
        self._places = RowIndex(self.ids)

    def rows_of(self, ids: Tensor) -> Tensor:
        """[n] the place of each store id; raises InputError for a node of another part."""
        return self._places.rows(ids)


def build_in_neighbors(
    part: PartitionBlocks, ring: RingExchange, counts: Mapping[str, int]
) -> dict[EdgeType, InNeighbors]:
    """For every edge type. Sources in other parts are known by the rows of their owners, who are asked for store ids:
    all ranks call it together. ``counts`` has the nodes of each type in the whole graph."""
    sources = {kind: _source_ids(part, ring, kind) for kind in part.nodes}
    order = {kind: torch.sort(rows.node_ids).indices for kind, rows in part.nodes.items()}
    return {
        kind: _in_neighbors(edges, sources[kind.src], order[kind.dst], counts[kind.src])
        for kind, edges in part.edges.items()
    }


def _source_ids(part: PartitionBlocks, ring: RingExchange, kind: str) -> list[Tensor]:
    """By part, store ids of the nodes that in-edges come from, as their columns number them."""
    found: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * ring.world.size
    own = part.nodes[kind].node_ids.contiguous()

    def visit(q: int, rows: list[Tensor]) -> None:
        found[q] = own if q == ring.world.rank else rows[0][:, 0].clone()

    ring.run([RowTable(part.exchange_plan(kind, "in"), own[:, None])], visit, op="ids of neighbours")
    return found


def _in_neighbors(edges: RelationBlocks, sources: list[Tensor], order: Tensor, count: int) -> InNeighbors:
    index = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    degree = edges.degree(self_loops=False)[order]
    indptr = torch.zeros(len(order) + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=indptr[1:])
    # The edges of a row follow each other in the store: the first one's id tells where any other goes.
    first = torch.full((len(order),), torch.iinfo(torch.int64).max)
    for cut in edges.in_blocks:
        for rows, piece in split_block(cut):
            first.scatter_reduce_(0, place[rows], cut.edge_ids[piece], "amin")
    keep = edges.weight is not None or edges.attr is not None
    src = torch.empty(int(indptr[-1]), dtype=index)
    where = torch.empty(len(src), dtype=torch.int64) if keep else None
    for cut, ids in zip(edges.in_blocks, sources, strict=True):
        ids = ids.to(index)
        for rows, piece in split_block(cut):
            at = place[rows]
            at = cut.edge_ids[piece] - first[at] + indptr[at]
            src[at] = ids[cut.structure.col[piece].long()]
            if where is not None:
                where[at] = torch.arange(cut.edges.start + piece.start, cut.edges.start + piece.stop)
    first[degree == 0] = 0
    return InNeighbors(CSR(indptr, src, count), degree, first, where, edges.weight, edges.attr)
