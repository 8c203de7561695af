"""The relay of a macrobatch: blocks of several batches, then every row of other parts that any of them reads, once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler, SampledBatch
from gnnfleet.sharded.sampling.feature_store import FeatureStore
from gnnfleet.strategies.macrobatch.feature_parallel import FeatureColumns
from gnnfleet.strategies.macrobatch.host_cache import HostCache, HostRequests
from gnnfleet.tasks.base import Batch, Task


@dataclass
class FetchStats:
    """What relays did."""

    exchanges: int = 0
    rows_read: int = 0  # rows of other parts that batches read, each batch by itself
    rows_requested: int = 0  # the same, once per relay
    hits: int = 0  # of these, rows that were kept from before
    fetched_bytes: int = 0
    wait_seconds: float = 0.0  # seconds in which steps waited for a relay


@dataclass(frozen=True, eq=False)
class MacrobatchPlan:
    """A macrobatch whose blocks are known: what it needs of other parts, ascending store ids by node type."""

    batches: Sequence[Batch]
    sampled: Sequence[SampledBatch]
    remote_ids: Mapping[str, Tensor]
    host_requests: Mapping[str, HostRequests]  # what all workers of this machine want, where they keep rows together
    first_batch: Sequence[
        Sequence[LocalView]
    ] = ()  # by batch and rank, the first blocks of all ranks, where columns are split


def owned_items(task: Task, items: Tensor, rank: int, owner: Callable[[str, Tensor], Tensor]) -> Tensor:
    """[n] bool: training items that a rank works on; ``owner`` gives the ranks of nodes by type and store id."""
    found = torch.zeros(len(items), dtype=torch.bool)
    for kind, which, ids in task.owners_of_items(items):
        found[which] = owner(kind, ids) == rank
    return found


def remote_ids(one: SampledBatch, kind: str) -> Tensor:
    """Store ids of the nodes of other parts that a batch reads."""
    return one.ids[kind][torch.cat(one.nodes[kind].remote_ids)]


@dataclass(frozen=True, eq=False)
class MacrobatchData:
    """A macrobatch ready to be trained on: its plan and rows of other parts, one for each of ``plan.wanted``."""

    plan: MacrobatchPlan
    rows: Mapping[str, Mapping[str, Tensor]]
    places: Mapping[str, Tensor]  # by node type, the place in ``rows`` of each that is wanted
    own: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]  # (rows of this part, ascending; what paged tables have)


@dataclass(eq=False)
class MacrobatchFetcher:
    """All ranks make and call it together; serves one thread at a time."""

    sampler: DistNeighborSampler
    features: FeatureStore
    task: Task
    given: bool  # whether the first layer's aggregate is a table, so that the last hop is not drawn
    host_cache: HostCache | None = None
    columns: FeatureColumns | None = None  # where features are split by column: nothing is fetched then
    stats: FetchStats = field(default_factory=FetchStats)

    def sample(self, batches: Sequence[Batch]) -> MacrobatchPlan:
        """Draw the blocks of some batches, as many on all ranks."""
        sampled = self.sampler.blocks([(batch.seeds, batch.key) for batch in batches], given=self.given)
        for one, batch in zip(sampled, batches, strict=True):
            one.views = [self.task.mask_edges(view, batch) for view in one.views]
            prepare_backward(one.views)
        self.stats.exchanges += 1
        if self.columns is not None:
            return MacrobatchPlan(batches, sampled, {}, {}, self.columns.exchange_blocks(self.sampler.world, sampled))
        wanted = {kind: torch.unique(torch.cat([remote_ids(one, kind) for one in sampled])) for kind in sampled[0].ids}
        plan = MacrobatchPlan(
            batches, sampled, wanted, {} if self.host_cache is None else self.host_cache.exchange_requests(wanted)
        )
        for kind, ids in plan.remote_ids.items():
            self.stats.rows_read += sum(len(remote_ids(one, kind)) for one in sampled)
            self.stats.rows_requested += len(ids)
        return plan

    def fetch(self, plan: MacrobatchPlan, future: Sequence[MacrobatchPlan] = ()) -> MacrobatchData:
        """Get the rows; ``future`` are the plans that follow, as far as they are known."""
        if self.columns is not None:
            return MacrobatchData(plan, {}, {}, {})
        if self.host_cache is None:
            found, order = self.features.fetch(plan.remote_ids)
            places = {kind: _inverse_permutation(rows) for kind, rows in order.items()}
            fetched = {kind: len(ids) for kind, ids in plan.remote_ids.items()}
        else:
            before = self.host_cache.hits
            found, fetched = self.host_cache.fetch(
                plan.remote_ids, plan.host_requests, [later.host_requests for later in future]
            )
            places = {kind: torch.arange(len(ids)) for kind, ids in plan.remote_ids.items()}
            self.stats.hits += self.host_cache.hits - before
        self.stats.fetched_bytes += sum(count * self.features.row_bytes(kind) for kind, count in fetched.items())
        return MacrobatchData(plan, found, places, self._read_own(plan))

    def _read_own(self, plan: MacrobatchPlan) -> dict[str, tuple[Tensor, Mapping[str, Tensor]]]:
        """Rows of this part from tables that are too large for memory, each once."""
        found: dict[str, tuple[Tensor, Mapping[str, Tensor]]] = {}
        for kind in dict.fromkeys(kind for kind, _ in sorted(self.features.paged)):
            own = self.features.node_index[kind].rows
            rows = torch.unique(torch.cat([own[one.nodes[kind].owner_places] for one in plan.sampled]))
            found[kind] = rows, self.features.read_own(kind, rows)
        self.features.drop_pages()
        return found

    def fetch_ahead(self, plans: Iterator[MacrobatchPlan], window: int) -> Generator[MacrobatchData]:
        """Plans as they are fetched, each knowing up to ``window`` that follow."""
        known: list[MacrobatchPlan] = []
        for plan in plans:
            known.append(plan)
            if len(known) > window:
                yield self.fetch(known.pop(0), known)
        while known:
            yield self.fetch(known.pop(0), known)


class BatchReader:
    """The rows that one batch of a macrobatch reads, put together from this part's and from fetched ones."""

    def __init__(self, relay: MacrobatchFetcher, fetched: MacrobatchData, place: int) -> None:
        self.batch, self.sampled = fetched.plan.batches[place], fetched.plan.sampled[place]
        self.first = fetched.plan.first_batch[place] if fetched.plan.first_batch else ()
        if relay.columns is not None:
            for kind, ids in self.sampled.ids.items():
                self.sampled.degrees[kind] = relay.columns.degrees_of(ids)
            return
        tables = relay.features
        self._tables, self._rows, self._own = tables, fetched.rows, fetched.own
        self._where: dict[str, _RowSources] = {}
        for kind, ids in self.sampled.ids.items():
            reached = self.sampled.nodes[kind]
            far = torch.cat(reached.remote_ids)
            there = fetched.places[kind][torch.searchsorted(fetched.plan.remote_ids[kind], ids[far])]
            self._where[kind] = _RowSources(
                tables.node_index[kind].rows[reached.owner_places], reached.rows, there, far
            )
            self.sampled.degrees[kind] = self._degrees(kind)

    def read(self, kind: str, name: str, *, out: Tensor | None = None) -> Tensor:
        """[S, F] rows of a table, half precision as float32, in the order of the blocks; perhaps into some columns."""
        own, far = self._tables.rows[kind][name], self._rows[kind][name]
        where = self._where[kind]
        if (kind, name) in self._tables.paged:
            known, tables = self._own[kind]
            own, where = tables[name], replace(where, own=torch.searchsorted(known, where.own))
        return where.read(own, far, out=out)

    def _degrees(self, kind: str) -> Callable[[bool], Tensor]:
        """Knows nothing but where degrees lie: views keep it, and rows must not outlive their batch."""
        names = [name for name in (DEGREE, WEIGHTED) if name in self._tables.rows[kind]]
        tables = {name: (self._tables.rows[kind][name], self._rows[kind][name]) for name in names}
        where, known = self._where[kind], dict[str, Tensor]()

        def degree(weighted: bool) -> Tensor:
            name = WEIGHTED if weighted and WEIGHTED in tables else DEGREE
            if name not in known:
                known[name] = where.read(*tables[name])[:, 0]
            return known[name]

        return degree


@dataclass(frozen=True, eq=False)
class _RowSources:
    """Where a batch finds the rows of one node type."""

    own: Tensor  # rows of this part
    at: Tensor  # where they go
    far: Tensor  # rows that were fetched
    far_at: Tensor

    def read(self, own: Tensor, far: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rows of a table, half precision as float32."""
        dtype = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else own.dtype
        if out is None:
            out = empty_buffer((len(self.at) + len(self.far_at), own.shape[1]), dtype)
        gather(own, self.own, dtype, out=out, at=self.at)
        gather(far, self.far, dtype, out=out, at=self.far_at)
        return out


def _inverse_permutation(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


X, DEGREE, WEIGHTED = "x", "degree", "weighted degree"
"""Names of tables; those of aggregates are the edge types'."""
