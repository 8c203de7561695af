"""Rows of other machines that stay from relay to relay, once per machine: its workers share the slots they lie in.

Every worker of a machine hears what all of them want and decides alike which rows are there, which are fetched, by
whom, and where they go. Slots change only inside a relay, after everyone has copied out what is needed of them. A
worker by itself is a machine of one. H workers on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import ByteBuffer, all_to_all_bytes
from gnnfleet.comm.collectives import barrier
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.comm.shared_memory import share_memory
from gnnfleet.comm.world import World
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.feature_store import FeatureStore, NamedTables
from gnnfleet.strategies.macrobatch.cache_policies import RowCache


@dataclass(frozen=True, eq=False)
class HostRequests:
    """What the workers of this machine want of one node type, for one relay."""

    local_ids: Tensor  # places in this worker's list of nodes that live on this machine
    remote_ids: Tensor  # places of the others
    ids_by_worker: tuple[Tensor, ...]  # H lists of ids, ascending: the others of every worker
    union: Tensor  # all of them, ascending


@dataclass(frozen=True, eq=False)
class CacheSlots:
    """Rows of one node type: which are there, and the memory they lie in, by table [capacity, F]."""

    cache: RowCache
    rows: Mapping[str, Tensor]


class HostCache:
    """All ranks of the run make and call it together, those of a machine with the same settings."""

    def __init__(self, tables: FeatureStore, host: World, ranks: Sequence[int], caches: Mapping[str, RowCache]) -> None:
        self.tables, self.host = tables, host
        self._here = torch.tensor(list(ranks))
        self._ring = RingExchange(host, max(1, host.size), 0, tables.ring.new_buffer)
        self.slots = {kind: CacheSlots(cache, self._allocate(kind, cache.capacity)) for kind, cache in caches.items()}
        self.hits = 0  # of this worker's rows

    def _allocate(self, kind: str, capacity: int) -> dict[str, Tensor]:
        found, at = {}, 0
        memory = share_memory(self.host, capacity * sum(_padded(table) for table in self.tables.rows[kind].values()))
        for name, table in self.tables.rows[kind].items():
            nbytes = capacity * table.shape[1] * table.element_size()
            found[name] = memory[at : at + nbytes].view(table.dtype).view(capacity, table.shape[1])
            at += capacity * _padded(table)
        return found

    def exchange_requests(self, wanted: Mapping[str, Tensor]) -> dict[str, HostRequests]:
        """Tell the workers of this machine what is wanted here, and hear the same of them; one round among them."""
        near, parcel = {}, ByteBuffer()
        for kind, ids in wanted.items():
            near[kind] = torch.isin(self.tables.owners.owner_of(kind, ids), self._here)
            far = ids[~near[kind]]
            parcel.write(torch.tensor([len(far)]))
            parcel.write(far)
        heard = [
            ByteBuffer(m)
            for m in all_to_all_bytes(self.host, [parcel.message] * self.host.size, what="nodes wanted here")
        ]
        found = {}
        for kind in wanted:
            each = tuple(one.read(int(one.read(1, torch.int64)), torch.int64) for one in heard)
            places = near[kind].nonzero()[:, 0], (~near[kind]).nonzero()[:, 0]
            found[kind] = HostRequests(*places, each, torch.unique(torch.cat(each)))
        return found

    def fetch(
        self,
        wanted: Mapping[str, Tensor],
        wants: Mapping[str, HostRequests],
        future: Sequence[Mapping[str, HostRequests]],
    ) -> tuple[NamedTables, dict[str, int]]:
        """(rows of ``wanted``, how many rows this worker fetched, for itself or for others here), by node type."""
        turns = {k: s.cache.step(wants[k].union, [later[k].union for later in future]) for k, s in self.slots.items()}
        missing = {kind: (turn.slots < 0).nonzero()[:, 0] for kind, turn in turns.items()}
        shares = {kind: self._share(rows, self.host.rank) for kind, rows in missing.items()}
        asked = {k: torch.cat([ids[wants[k].local_ids], wants[k].union[shares[k]]]) for k, ids in wanted.items()}
        rows, order = self.tables.fetch(asked)
        found: NamedTables = {}
        for kind, ids in wanted.items():
            want, turn, came = wants[kind], turns[kind], torch.argsort(order[kind])
            mine = _among(want.union, want.ids_by_worker[self.host.rank])  # this worker's, of all that are wanted
            place = torch.full((len(want.union),), -1)
            place[mine] = want.remote_ids
            hits = (mine & (turn.slots >= 0)).nonzero()[:, 0]
            self.hits += len(hits)
            share = {name: gather(table, came[len(want.local_ids) :]) for name, table in rows[kind].items()}
            found[kind] = {}
            for name, table in rows[kind].items():
                out = found[kind][name] = self.tables.ring.new_buffer((len(ids), int(table.shape[1])), table.dtype)
                gather(table, came[: len(want.local_ids)], out=out, at=want.local_ids)
                gather(self.slots[kind].rows[name], turn.slots[hits], out=out, at=place[hits])
            self._swap(want, missing[kind], mine, place, share, found[kind])
            barrier(self.host)  # everyone has read
            self._admit(kind, turn.admitted, turn.target_slots, missing[kind], share)
        barrier(self.host)  # everyone has written
        return found, {kind: len(ids) for kind, ids in asked.items()}

    def _share(self, missing: Tensor, rank: int) -> Tensor:
        """The part of what is missing that a worker fetches."""
        return missing[rank :: self.host.size]

    def _swap(
        self,
        want: HostRequests,
        missing: Tensor,
        mine: Tensor,
        place: Tensor,
        share: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
    ) -> None:
        """Give the workers here what was fetched for them, and take what they fetched."""
        own = self._share(missing, self.host.rank)
        give = tuple(_among(want.union, ids)[own].nonzero()[:, 0] for ids in want.ids_by_worker)
        theirs = [self._share(missing, q) for q in range(self.host.size)]
        need = [rows[mine[rows]] for rows in theirs]
        routes = ExchangePlan(
            tuple(rows[:0] if q == self.host.rank else rows for q, rows in enumerate(give)),
            tuple(0 if q == self.host.rank else len(rows) for q, rows in enumerate(need)),
        )

        def visit(q: int, rows: list[Tensor]) -> None:
            for table, part in zip(out.values(), rows, strict=True):
                picked = give[q] if q == self.host.rank else torch.arange(len(part))
                gather(part, picked, out=table, at=place[need[q]])

        self._ring.run([RowTable(routes, share[name]) for name in out], visit, op="rows fetched here")

    def _admit(self, kind: str, admitted: Tensor, into: Tensor, missing: Tensor, share: Mapping[str, Tensor]) -> None:
        """Put what this worker fetched into its slots; the others do the same with theirs."""
        number = torch.searchsorted(missing, admitted)
        own = number % self.host.size == self.host.rank
        for name, rows in share.items():
            gather(rows, number[own] // self.host.size, out=self.slots[kind].rows[name], at=into[own])


def _padded(table: Tensor) -> int:
    """Bytes of a row in slots, so that tables of any type begin aligned."""
    return -(-table.shape[1] * table.element_size() // 8) * 8


def _among(union: Tensor, ids: Tensor) -> Tensor:
    """[n] bool: which of ``union`` are among ``ids``; both ascending."""
    found = torch.zeros(len(union), dtype=torch.bool)
    found[torch.searchsorted(union, ids)] = True
    return found
