"""Distributed feature store: rows that do not change (features, aggregates, degrees), fetched by store id.

Each node's rows are stored by its owner. A fetch covers all tables of all node types: ids go to owners, rows return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import all_to_all_lists
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.ops.paging import drop_pages, prefetch_pages, read_rows
from gnnfleet.sharded.full_batch.row_lookup import OwnershipMap
from gnnfleet.sharded.sampling.neighbor_index import LocalNodes

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
