"""A cache of rows of other hosts, one per host: the workers of a host share its slots.

Every worker receives the requests of all workers of its host and runs the same policy on their union, so decisions are
never sent. Slots change only inside a fetch, between two barriers. A lone worker is a host of one. H workers per host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.all_to_all import all_to_all_lists
from gnnfleet.comm.collectives import barrier
from gnnfleet.comm.halo_exchange import ExchangePlan, RingExchange, RowTable
from gnnfleet.comm.shared_memory import share_memory
from gnnfleet.comm.world import World
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.feature_store import FeatureStore, NamedTables
from gnnfleet.strategies.macrobatch.cache_policies import RowCache


@dataclass(frozen=True, eq=False)
class HostRequests:
    """Requests of the workers of this host, for one node type and macrobatch. Ids are ascending."""

    same_host: Tensor  # positions in this worker's list of ids whose owners are on this host
    other_hosts: Tensor  # positions of the others
    ids_by_worker: tuple[Tensor, ...]  # H lists: the ids owned by other hosts that each worker requests
    union: Tensor  # [U] the distinct ids of these lists


class HostCache:
    """Collective: all ranks of the run construct and call it together, those of a host with the same settings."""

    def __init__(self, tables: FeatureStore, host: World, ranks: Sequence[int], caches: Mapping[str, RowCache]) -> None:
        self.tables, self.host, self.caches = tables, host, caches
        self._host_ranks = torch.tensor(list(ranks))
        self._ring = RingExchange(host, max(1, host.size), 0, tables.ring.new_buffer)
        # By node type and table, [capacity, F]: the rows in the slots.
        self._slots = {kind: self._allocate(kind, cache.capacity) for kind, cache in caches.items()}

    def _allocate(self, kind: str, capacity: int) -> dict[str, Tensor]:
        slots, start = {}, 0
        memory = share_memory(self.host, capacity * sum(_padded(table) for table in self.tables.rows[kind].values()))
        for name, table in self.tables.rows[kind].items():
            nbytes = capacity * table.shape[1] * table.element_size()
            slots[name] = memory[start : start + nbytes].view(table.dtype).view(capacity, table.shape[1])
            start += capacity * _padded(table)
        return slots

    def exchange_requests(self, ids: Mapping[str, Tensor]) -> dict[str, HostRequests]:
        """Exchange the requested ids with the workers of this host; one round among them."""
        on_host = {
            kind: torch.isin(self.tables.owners.owner_of(kind, requested), self._host_ranks)
            for kind, requested in ids.items()
        }
        remote = [requested[~on_host[kind]] for kind, requested in ids.items()]
        lists = all_to_all_lists(self.host, [remote] * self.host.size, torch.int64, op="requests of this host")
        requests = {}
        for kind, by_worker in zip(ids, zip(*lists, strict=True), strict=True):
            positions = on_host[kind].nonzero()[:, 0], (~on_host[kind]).nonzero()[:, 0]
            requests[kind] = HostRequests(*positions, by_worker, torch.unique(torch.cat(by_worker)))
        return requests

    def fetch(
        self,
        ids: Mapping[str, Tensor],
        requests: Mapping[str, HostRequests],
        future: Sequence[Mapping[str, HostRequests]],
    ) -> tuple[NamedTables, dict[str, int], int]:
        """(rows of ``ids``, numbers of rows this worker fetched for this host by node type, hits of this worker)."""
        decisions = {
            kind: cache.step(requests[kind].union, [later[kind].union for later in future])
            for kind, cache in self.caches.items()
        }
        missing = {kind: (decision.slots < 0).nonzero()[:, 0] for kind, decision in decisions.items()}
        shares = {kind: self._share(positions, self.host.rank) for kind, positions in missing.items()}
        to_fetch = {
            kind: torch.cat([requested[requests[kind].same_host], requests[kind].union[shares[kind]]])
            for kind, requested in ids.items()
        }
        fetched, order = self.tables.fetch(to_fetch)
        rows: NamedTables = {}
        num_hits = 0
        for kind, requested in ids.items():
            request, decision = requests[kind], decisions[kind]
            num_direct, arrived = len(request.same_host), torch.argsort(order[kind])
            is_local = _is_among(request.union, request.ids_by_worker[self.host.rank])
            output_at = torch.full((len(request.union),), -1)
            output_at[is_local] = request.other_hosts
            hits = (is_local & (decision.slots >= 0)).nonzero()[:, 0]
            num_hits += len(hits)
            share = {name: gather(table, arrived[num_direct:]) for name, table in fetched[kind].items()}
            rows[kind] = {}
            for name, table in fetched[kind].items():
                out = self.tables.ring.new_buffer((len(requested), int(table.shape[1])), table.dtype)
                gather(table, arrived[:num_direct], out=out, at=request.same_host)
                gather(self._slots[kind][name], decision.slots[hits], out=out, at=output_at[hits])
                rows[kind][name] = out
            self._swap(request, missing[kind], output_at, share, rows[kind])
            barrier(self.host)  # all workers have read their hits
            self._admit(kind, decision.admitted, decision.target_slots, missing[kind], share)
        barrier(self.host)  # all workers have written their slots
        return rows, {kind: len(fetch_ids) for kind, fetch_ids in to_fetch.items()}, num_hits

    def _share(self, missing: Tensor, worker: int) -> Tensor:
        """The missing ids that a worker of this host fetches."""
        return missing[worker :: self.host.size]

    def _swap(
        self,
        requests: HostRequests,
        missing: Tensor,
        output_at: Tensor,
        share: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
    ) -> None:
        """Exchange the fetched rows among the workers of this host.

        ``missing`` are positions in ``union``; ``output_at`` [U] has those in ``out``, −1 for ids of other workers.
        """
        rank = self.host.rank
        fetched = self._share(missing, rank)
        send = tuple(_is_among(requests.union, ids)[fetched].nonzero()[:, 0] for ids in requests.ids_by_worker)
        shares = [self._share(missing, q) for q in range(self.host.size)]
        receive = [positions[output_at[positions] >= 0] for positions in shares]
        plan = ExchangePlan(
            tuple(rows[:0] if q == rank else rows for q, rows in enumerate(send)),
            tuple(0 if q == rank else len(rows) for q, rows in enumerate(receive)),
        )

        def on_rows(q: int, received: list[Tensor]) -> None:
            for table, rows in zip(out.values(), received, strict=True):
                picked = send[q] if q == rank else torch.arange(len(rows))
                gather(rows, picked, out=table, at=output_at[receive[q]])

        self._ring.run([RowTable(plan, share[name]) for name in out], on_rows, op="rows for this host")

    def _admit(self, kind: str, admitted: Tensor, slots: Tensor, missing: Tensor, share: Mapping[str, Tensor]) -> None:
        """Write the rows this worker fetched into their slots; the other workers write theirs."""
        number = torch.searchsorted(missing, admitted)
        is_local = number % self.host.size == self.host.rank
        for name, rows in share.items():
            gather(rows, number[is_local] // self.host.size, out=self._slots[kind][name], at=slots[is_local])


def _padded(table: Tensor) -> int:
    """Bytes of a row in slots, so that tables of any type begin aligned."""
    return -(-table.shape[1] * table.element_size() // 8) * 8


def _is_among(union: Tensor, ids: Tensor) -> Tensor:
    """[U] bool: the members of ``union`` that are in ``ids``, a subset; both ascending."""
    is_member = torch.zeros(len(union), dtype=torch.bool)
    is_member[torch.searchsorted(union, ids)] = True
    return is_member
