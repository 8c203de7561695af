"""Distributed feature store: rows that do not change (features, aggregates, degrees), fetched by store id.

Each node's rows are stored by its owner. A fetch covers all tables of all node types: ids go to owners, rows return.

For sampling, the in-edges of a partition are put into store order: the k-th in-edge of a node is drawn, counted as the
store counts. A node's position is its rank among the partition's nodes of its type by ascending store id. n positions,
E edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import all_to_all_lists
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.graph.graph import EdgeType, index_dtype
from gnnfleet.graph.views.row_index import RowIndex
from gnnfleet.ops.csr import CSR, inverse_permutation, offsets_of
from gnnfleet.ops.gather import drop_pages, gather, prefetch_pages, read_rows
from gnnfleet.sharded.full_batch.partition_blocks import PartitionBlocks, RelationBlocks, split_block
from gnnfleet.sharded.full_batch.row_lookup import OwnershipMap


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
    position = inverse_permutation(order)
    degree = edges.degree(self_loops=False)[order]
    indptr = offsets_of(degree)
    # The in-edges of a node have consecutive store ids: the first id tells where any other goes.
    first = torch.full((len(order),), torch.iinfo(torch.int64).max)
    for block in edges.in_blocks:
        for rows, piece in split_block(block):
            first.scatter_reduce_(0, position[rows], block.edge_ids[piece], "amin")
    has_data = edges.weight is not None or edges.attr is not None
    col = torch.empty(int(indptr[-1]), dtype=index_dtype(count))
    partition_order = torch.empty(len(col), dtype=torch.int64) if has_data else None
    for block, source_ids in zip(edges.in_blocks, sources, strict=True):
        col_ids = source_ids.to(col.dtype)
        for rows, piece in split_block(block):
            at = position[rows]
            at = block.edge_ids[piece] - first[at] + indptr[at]
            col[at] = col_ids[block.structure.col[piece].long()]
            if partition_order is not None:
                partition_order[at] = torch.arange(block.edges.start + piece.start, block.edges.start + piece.stop)
    first[degree == 0] = 0
    return InNeighbors(CSR(indptr, col, count), degree, first, partition_order, edges.weight, edges.attr)


NamedTables = dict[str, dict[str, Tensor]]
"""{node type: {name of a table: rows}}."""


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """``rows`` are those of this partition, [n, F] in its order, under the same names and dtypes on all ranks."""

    rows: Mapping[str, Mapping[str, Tensor]]
    node_index: Mapping[str, LocalNodes]
    owners: OwnershipMap
    ring: RingExchange
    paged: frozenset[tuple[str, str]] = frozenset()  # (node type, table) of tables on disk, too large for memory

    def row_bytes(self, kind: str) -> int:
        """Bytes of a node's rows in all tables."""
        return sum(table.shape[1] * table.element_size() for table in self.rows[kind].values())

    def paged_bytes(self, kind: str) -> int:
        """Bytes of a node's rows in paged tables."""
        tables = [self.rows[kind][name] for table_kind, name in self.paged if table_kind == kind]
        return sum(table.shape[1] * table.element_size() for table in tables)

    def fetch(self, ids: Mapping[str, Tensor]) -> tuple[NamedTables, dict[str, Tensor]]:
        """Collective. (rows by owner, by node type [n] the position in ``ids`` of each row) for distinct remote ids.

        Two rounds.
        """
        world = self.ring.world
        orders, counts = {}, {}
        for kind in self.rows:
            owner = self.owners.owner_of(kind, ids[kind])
            orders[kind] = torch.argsort(owner, stable=True)
            counts[kind] = torch.bincount(owner, minlength=world.size).tolist()
            assert not counts[kind][world.rank], "local rows are not fetched"
        requested = self._request({kind: ids[kind][order] for kind, order in orders.items()}, counts)
        fetched: NamedTables = {
            kind: {
                name: self.ring.new_buffer((len(ids[kind]), table.shape[1]), table.dtype)
                for name, table in tables.items()
            }
            for kind, tables in self.rows.items()
        }
        row_tables, targets = [], []
        for kind, tables in self.rows.items():
            plan = ExchangePlan(tuple(requested[kind]), tuple(counts[kind]))
            for name, table in tables.items():
                row_tables.append(RowTable(plan, table))
                targets.append(torch.split(fetched[kind][name], counts[kind]))

        def on_rows(q: int, received: list[Tensor]) -> None:
            for target, rows in zip(targets, received, strict=True):
                if q != world.rank:
                    target[q].copy_(rows)

        self._prefetch_pages(requested)
        self.ring.run(row_tables, on_rows, op="rows of nodes")
        self.drop_pages()
        return fetched, orders

    def read_own(self, kind: str, rows: Tensor) -> dict[str, Tensor]:
        """Rows of this partition ([m] ascending) from the paged tables of a type, in the order in which they lie."""
        tables = {name: table for name, table in self.rows[kind].items() if (kind, name) in self.paged}
        return {name: read_rows(table, rows) for name, table in tables.items()}

    def drop_pages(self) -> None:
        for kind, name in self.paged:
            drop_pages(self.rows[kind][name])

    def _prefetch_pages(self, requested: Mapping[str, list[Tensor]]) -> None:
        """Read requested rows ahead in the order in which they lie; the exchange may then read them in any order."""
        for kind, name in self.paged:
            prefetch_pages(self.rows[kind][name], torch.unique(torch.cat(requested[kind])))

    def _request(self, ids: Mapping[str, Tensor], counts: Mapping[str, list[int]]) -> dict[str, list[Tensor]]:
        """Send ids to their owners; by node type and rank, the rows of this partition that other ranks request."""
        world, kinds = self.ring.world, list(self.rows)
        ids_by_owner = {kind: torch.split(ids[kind], counts[kind]) for kind in kinds}
        lists = [[ids_by_owner[kind][q] for kind in kinds] for q in range(world.size)]
        requested: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
        for id_lists in all_to_all_lists(world, lists, torch.int64, op="nodes whose rows are wanted"):
            for kind, requested_ids in zip(kinds, id_lists, strict=True):
                index = self.node_index[kind]
                requested[kind].append(index.rows[index.positions_of(requested_ids)])
        return requested
