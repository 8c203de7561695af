"""Rows that do not change (features, their aggregates, degrees), each with its node's owner; fetched by store id.

Several tables of several node types travel in one relay: ids go to owners, rows come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.ops.paging import drop_pages, prefetch_pages, read_rows
from gnnfleet.sharded.full_batch.row_lookup import OwnershipMap
from gnnfleet.sharded.sampling.neighbor_index import OwnNodes

NamedTables = dict[str, dict[str, Tensor]]
"""{node type: {name of a table: rows}}."""

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """``rows`` are those of this part, [n, F] in its order, under the same names and dtypes on all ranks."""

    rows: Mapping[str, Mapping[str, Tensor]]
    node_index: Mapping[str, OwnNodes]
    owners: OwnershipMap
    ring: RingExchange
    paged: frozenset[tuple[str, str]] = frozenset()  # (type, table) that lie in files and are too large for memory

    def row_bytes(self, kind: str) -> int:
        """What one node of a type weighs."""
        return sum(table.shape[1] * table.element_size() for table in self.rows[kind].values())

    def paged_bytes(self, kind: str) -> int:
        """What one of this part's nodes weighs in tables that are paged."""
        tables = [self.rows[kind][name] for of, name in self.paged if of == kind]
        return sum(table.shape[1] * table.element_size() for table in tables)

    def fetch(self, ids: Mapping[str, Tensor]) -> tuple[NamedTables, dict[str, Tensor]]:
        """(rows of nodes of other parts, by node type [n] the place in ``wanted`` of each), for different store ids.

        Rows lie by owner, as they come. Two rounds; all ranks call it.
        """
        world = self.ring.world
        orders, counts = {}, {}
        for kind in self.rows:
            owner = self.owners.owner_of(kind, ids[kind])
            orders[kind] = torch.argsort(owner, stable=True)
            counts[kind] = torch.bincount(owner, minlength=world.size).tolist()
            assert not counts[kind][world.rank], "own rows are not fetched"
        asked = self._request({kind: ids[kind][order] for kind, order in orders.items()}, counts)
        found: NamedTables = {
            kind: {
                name: self.ring.new_buffer((len(ids[kind]), table.shape[1]), table.dtype)
                for name, table in tables.items()
            }
            for kind, tables in self.rows.items()
        }
        lanes, targets = [], []
        for kind, tables in self.rows.items():
            routes = ExchangePlan(tuple(asked[kind]), tuple(counts[kind]))
            for name, table in tables.items():
                lanes.append(RowTable(routes, table))
                targets.append(torch.split(found[kind][name], counts[kind]))

        def visit(q: int, rows: list[Tensor]) -> None:
            for out, part in zip(targets, rows, strict=True):
                if q != world.rank:
                    out[q].copy_(part)

        self._prefetch_pages(asked)
        self.ring.run(lanes, visit, op="rows of nodes")
        self.drop_pages()
        return found, orders

    def read_own(self, kind: str, rows: Tensor) -> dict[str, Tensor]:
        """Rows of this part ([m] ascending) from tables of a type that are paged, in the order in which they lie."""
        tables = {name: table for name, table in self.rows[kind].items() if (kind, name) in self.paged}
        return {name: read_rows(table, rows) for name, table in tables.items()}

    def drop_pages(self) -> None:
        """What was read of paged tables leaves memory."""
        for kind, name in self.paged:
            drop_pages(self.rows[kind][name])

    def _prefetch_pages(self, asked: Mapping[str, list[Tensor]]) -> None:
        """What others want is asked for in the order in which it lies; then it may be read in any."""
        for kind, name in self.paged:
            prefetch_pages(self.rows[kind][name], torch.unique(torch.cat(asked[kind])))

    def _request(self, wanted: Mapping[str, Tensor], counts: Mapping[str, list[int]]) -> dict[str, list[Tensor]]:
        """Tell owners which rows are wanted; by node type and rank, rows of this part that others want."""
        world, kinds = self.ring.world, list(self.rows)
        parts = {kind: torch.split(wanted[kind], counts[kind]) for kind in kinds}
        messages = []
        for q in range(world.size):
            parcel = ByteBuffer()
            parcel.write(torch.tensor([counts[kind][q] for kind in kinds], dtype=torch.int64))
            for kind in kinds:
                parcel.write(parts[kind][q])
            messages.append(parcel.message)
        found: dict[str, list[Tensor]] = {kind: [_NONE] * world.size for kind in kinds}
        for q, message in enumerate(all_to_all_bytes(world, messages, what="nodes whose rows are wanted")):
            if q == world.rank:
                continue
            parcel = ByteBuffer(message)
            lengths = parcel.read(len(kinds), torch.int64).tolist()
            for kind, length in zip(kinds, lengths, strict=True):
                own = self.node_index[kind]
                found[kind][q] = own.rows[own.rows_of(parcel.read(length, torch.int64))]
        return found
