"""Fetch a macrobatch: sample the blocks of several batches, then fetch every remote row that they read, once.

A macrobatch passes through three values in this order: the ``MacrobatchPlan`` (blocks and ids of remote rows), the
``MacrobatchData`` (with the rows), and a ``BatchReader`` for every batch, which a step reads its inputs from.

The number of batches per fetch is what the buffer holds, judged by sampling the first ones. A row that several batches
read is fetched once; beyond the sampled batches, every batch is assumed to add as many rows as the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from gnnfleet.graph.sampling.loader import prepare_backward
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view_base import Degrees, stored_degrees
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.csr import inverse_permutation
from gnnfleet.ops.gather import gather
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler, SampledBatch
from gnnfleet.sharded.sampling.feature_store import FeatureStore
from gnnfleet.strategies.macrobatch.feature_parallel import FeatureColumns
from gnnfleet.strategies.macrobatch.host_cache import HostCache, HostRequests
from gnnfleet.tasks.base import Batch, Task

DEGREE_TABLES = "degree", "weighted degree", "self-loops"  # by kind of ``Degrees``
"""Names of tables in the feature store, beside those of features and aggregates."""


@dataclass(frozen=True)
class FetchStats:
    """Counts of one macrobatch, or sums over several."""

    exchanges: int = 0
    rows_read: int = 0  # remote rows that batches read, counted for every batch
    rows_requested: int = 0  # the same, counted once per macrobatch
    hits: int = 0  # requested rows that were in the cache
    fetched_bytes: int = 0

    def __add__(self, other: FetchStats) -> FetchStats:
        return FetchStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, eq=False)
class MacrobatchPlan:
    batches: Sequence[Batch]
    sampled: Sequence[SampledBatch]
    remote_ids: Mapping[str, Tensor]  # by node type, ascending store ids of the remote rows it reads
    host_requests: Mapping[str, HostRequests]  # with a cache, by node type: requests of all workers of this host
    first_blocks: Sequence[Sequence[LocalView]]  # with feature columns, by batch: the first blocks of all ranks


@dataclass(frozen=True, eq=False)
class MacrobatchData:
    plan: MacrobatchPlan
    rows: Mapping[str, Mapping[str, Tensor]]  # by node type and table, the remote rows
    positions: Mapping[str, Tensor]  # by node type, the position in ``rows`` of each of ``plan.remote_ids``
    paged: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]  # (ascending local rows, their values in paged tables)
    stats: FetchStats


@dataclass(frozen=True, eq=False)
class BatchSampler:
    """Samples the blocks of several batches, without the edges that the task hides."""

    sampler: DistNeighborSampler
    task: Task
    skips_last_hop: bool  # the first layer's aggregate is a table of the feature store

    def sample(self, batches: Sequence[Batch]) -> list[SampledBatch]:
        """Collective. All ranks pass the same number of batches."""
        sampled = self.sampler.blocks(
            [(batch.seeds, batch.key) for batch in batches], skip_last_hop=self.skips_last_hop
        )
        for blocks, batch in zip(sampled, batches, strict=True):
            blocks.views = [self.task.mask_edges(view, batch) for view in blocks.views]
            prepare_backward(blocks.views)
        return sampled


@dataclass(frozen=True, eq=False)
class MacrobatchFetcher:
    """Samples and fetches macrobatches. All methods are collective; one thread at a time may use them."""

    sampler: BatchSampler
    features: FeatureStore
    batches_per_fetch: int
    lookahead: int = 0  # macrobatches sampled ahead of the one that is fetched
    host_cache: HostCache | None = None
    columns: FeatureColumns | None = None  # with features split by column, no rows are fetched

    def macrobatches(self, batches: Iterator[Batch]) -> Generator[MacrobatchData]:
        """Fetch the batches in groups of ``batches_per_fetch``."""
        plans: deque[MacrobatchPlan] = deque()
        while group := list(islice(batches, self.batches_per_fetch)):
            plans.append(self.sample(group))
            if len(plans) > self.lookahead:
                yield self.fetch(plans.popleft(), list(plans))
        while plans:
            yield self.fetch(plans.popleft(), list(plans))

    def sample(self, batches: Sequence[Batch]) -> MacrobatchPlan:
        sampled = self.sampler.sample(batches)
        if self.columns is not None:
            first_blocks = self.columns.exchange_blocks(self.features.ring.world, sampled)
            return MacrobatchPlan(batches, sampled, {}, {}, first_blocks)
        remote_ids = {
            kind: torch.unique(torch.cat([batch.remote_ids(kind) for batch in sampled])) for kind in sampled[0].ids
        }
        requests = {} if self.host_cache is None else self.host_cache.exchange_requests(remote_ids)
        return MacrobatchPlan(batches, sampled, remote_ids, requests, ())

    def fetch(self, plan: MacrobatchPlan, future: Sequence[MacrobatchPlan] = ()) -> MacrobatchData:
        """Fetch the rows of a plan. ``future`` has the plans that follow, for the cache."""
        if self.columns is not None:
            return MacrobatchData(plan, {}, {}, {}, FetchStats(exchanges=1))
        if self.host_cache is None:
            rows, order = self.features.fetch(plan.remote_ids)
            positions = {kind: inverse_permutation(sources) for kind, sources in order.items()}
            counts, hits = {kind: len(ids) for kind, ids in plan.remote_ids.items()}, 0
        else:
            later = [follower.host_requests for follower in future]
            rows, counts, hits = self.host_cache.fetch(plan.remote_ids, plan.host_requests, later)
            positions = {kind: torch.arange(len(ids)) for kind, ids in plan.remote_ids.items()}
        stats = FetchStats(
            exchanges=1,
            rows_read=sum(len(batch.remote_ids(kind)) for kind in plan.remote_ids for batch in plan.sampled),
            rows_requested=sum(map(len, plan.remote_ids.values())),
            hits=hits,
            fetched_bytes=sum(count * self.features.row_bytes(kind) for kind, count in counts.items()),
        )
        return MacrobatchData(plan, rows, positions, self._read_paged(plan), stats)

    def _read_paged(self, plan: MacrobatchPlan) -> dict[str, tuple[Tensor, Mapping[str, Tensor]]]:
        """Read local rows from tables that are too large for memory, each row once."""
        paged: dict[str, tuple[Tensor, Mapping[str, Tensor]]] = {}
        for kind in dict.fromkeys(kind for kind, _ in sorted(self.features.paged)):
            local_rows = self.features.node_index[kind].rows
            rows = torch.unique(torch.cat([local_rows[batch.nodes[kind].positions] for batch in plan.sampled]))
            paged[kind] = rows, self.features.read_own(kind, rows)
        self.features.drop_pages()
        return paged

    def readers(self, macrobatch: MacrobatchData) -> Iterator[BatchReader]:
        """One reader per batch. Not collective."""
        return (BatchReader(self, macrobatch, index) for index in range(len(macrobatch.plan.batches)))


class BatchReader:
    """Reads the inputs of one batch from local and fetched rows."""

    def __init__(self, fetcher: MacrobatchFetcher, macrobatch: MacrobatchData, index: int) -> None:
        plan = macrobatch.plan
        self.batch, self.sampled = plan.batches[index], plan.sampled[index]
        self.first_blocks = plan.first_blocks[index] if plan.first_blocks else ()
        if fetcher.columns is not None:
            for kind, ids in self.sampled.ids.items():
                self.sampled.degrees[kind] = fetcher.columns.degrees_of(ids)
            return
        self._features, self._remote, self._paged = fetcher.features, macrobatch.rows, macrobatch.paged
        self._sources: dict[str, _RowSources] = {}
        for kind, ids in self.sampled.ids.items():
            nodes = self.sampled.nodes[kind]
            remote_at = torch.cat(nodes.remote_rows)
            local = self._features.node_index[kind].rows[nodes.positions]
            remote = macrobatch.positions[kind][torch.searchsorted(plan.remote_ids[kind], ids[remote_at])]
            self._sources[kind] = _RowSources(local, nodes.rows, remote, remote_at)
            self.sampled.degrees[kind] = self._degrees(kind)

    def read(self, kind: str, table: str, *, out: Tensor | None = None) -> Tensor:
        """[S, F] rows of a table in the order of the blocks, half precision as float32; written to ``out`` if given."""
        local, sources = self._features.rows[kind][table], self._sources[kind]
        if (kind, table) in self._features.paged:
            rows, tables = self._paged[kind]
            local, sources = tables[table], replace(sources, local=torch.searchsorted(rows, sources.local))
        return sources.read(local, self._remote[kind][table], out=out)

    def _degrees(self, kind: str) -> Degrees:
        """Degrees of the batch's nodes. Views keep this function, so it must not refer to the reader and its rows."""
        tables = {
            number: (self._features.rows[kind][name], self._remote[kind][name])
            for number, name in enumerate(DEGREE_TABLES)
            if name in self._features.rows[kind]
        }
        sources = self._sources[kind]
        return stored_degrees(cache(lambda number: sources.read(*tables[number])[:, 0]), tables)


@dataclass(frozen=True, eq=False)
class _RowSources:
    """Positions of a batch's rows of one node type: local and remote rows, and where each goes."""

    local: Tensor
    local_at: Tensor
    remote: Tensor
    remote_at: Tensor

    def read(self, local: Tensor, remote: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rows of a table, half precision as float32."""
        dtype = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else local.dtype
        if out is None:
            out = empty_buffer((len(self.local_at) + len(self.remote_at), local.shape[1]), dtype)
        gather(local, self.local, dtype, out=out, at=self.local_at)
        gather(remote, self.remote, dtype, out=out, at=self.remote_at)
        return out


def owned_items(task: Task, items: Tensor, rank: int, owner: Callable[[str, Tensor], Tensor]) -> Tensor:
    """[n] bool: training items that a rank works on; ``owner`` gives the ranks of nodes by type and store id."""
    is_owned = torch.zeros(len(items), dtype=torch.bool)
    for kind, positions, ids in task.owners_of_items(items):
        is_owned[positions] = owner(kind, ids) == rank
    return is_owned


WARMUP_BATCHES = 8
"""Batches sampled before training."""


@dataclass(frozen=True)
class WarmupSample:
    """Sizes of the first batches of an epoch."""

    rows: tuple[float, ...]  # bytes of the distinct rows that the first 1, 2, … batches fetch or read from disk
    batch_rows: float  # bytes of the rows of a single batch, on average
    blocks: float  # bytes of the blocks of a batch, on average
    scratch: float = 0.0  # bytes of working memory for sampling a batch

    @classmethod
    def of(
        cls, sampled: Sequence[SampledBatch], first_blocks: Sequence[Sequence[LocalView]], features: FeatureStore
    ) -> WarmupSample:
        """Count rows that are fetched from other ranks, and local rows that are read from files."""
        count = len(sampled)
        blocks = sum(block_bytes(batch.views) for batch in sampled) + sum(map(block_bytes, first_blocks))
        scratch = sum(batch.scratch for batch in sampled)

        def reads() -> Iterator[tuple[list[Tensor], float]]:
            for kind in features.rows:
                yield [batch.remote_ids(kind) for batch in sampled], features.row_bytes(kind)
                yield [batch.ids[kind][batch.nodes[kind].rows] for batch in sampled], features.paged_bytes(kind)

        return cls.of_reads(reads(), count, blocks / count, scratch / count)

    @classmethod
    def of_reads(
        cls, reads: Iterable[tuple[Sequence[Tensor], float]], count: int, blocks: float, scratch: float = 0.0
    ) -> WarmupSample:
        """``reads`` has one entry per table: (ids that each of ``count`` batches reads, bytes of a row)."""
        rows, batch_rows = [0.0] * count, 0.0
        for ids, row_bytes in reads:
            first = first_list_of(ids) if row_bytes else torch.empty(0)
            for m in range(count):
                rows[m] += row_bytes * int((first <= m).sum())
            batch_rows += row_bytes * sum(map(len, ids)) / count
        return cls(tuple(rows), batch_rows, blocks, scratch)

    def rows_per_fetch(self, batches: int) -> float:
        """Bytes of the distinct rows of one fetch."""
        if batches <= len(self.rows):
            return self.rows[batches - 1]
        step = self.rows[-1] - self.rows[-2] if len(self.rows) > 1 else self.rows[-1]
        return self.rows[-1] + (batches - len(self.rows)) * step

    def bytes(self, batches: int, *, prefetch: int, lookahead: int) -> float:
        """Memory of all macrobatches at a time: rows of the fetched ones, blocks of the sampled ones."""
        blocks = (1 + prefetch + lookahead) * batches * self.blocks + batches * self.scratch
        return (1 + prefetch) * self.rows_per_fetch(batches) + blocks

    def duplication(self, batches: int) -> float:
        """Number of uses of a fetched row."""
        return batches * self.batch_rows / max(self.rows_per_fetch(batches), 1.0)


def choose_batches_per_fetch(
    warmup: WarmupSample, limit: float, max_batches: int, *, prefetch: int, lookahead: int
) -> int:
    """The largest number of batches per fetch within ``limit`` bytes, at least 1."""
    batches = 1
    while batches < max_batches and warmup.bytes(batches + 1, prefetch=prefetch, lookahead=lookahead) <= limit:
        batches += 1
    return batches


def block_bytes(views: Sequence[LocalView]) -> float:
    """Memory of the structure of blocks, transposed copies included."""
    total = 0
    for view in views:
        for relation in view.relations.values():
            structure = relation.structure
            edge_bytes = structure.col.element_size() + 8
            has_transposed = "transposed" in structure.__dict__
            total += structure.num_edges * edge_bytes * (1 + has_transposed) + 16 * structure.num_rows
        total += 8 * sum(len(rows.node_ids) for rows in view.nodes.values())
    return float(total)


def first_list_of(ids: Sequence[Tensor]) -> Tensor:
    """For every distinct id, the index of the first list that has it."""
    list_index = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(batch_ids) for batch_ids in ids]))
    distinct, inverse = torch.unique(torch.cat(list(ids)), return_inverse=True)
    return torch.full((len(distinct),), len(ids)).scatter_reduce(0, inverse, list_index, "amin")
