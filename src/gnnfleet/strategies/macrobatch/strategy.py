"""Sampled training on parts: a step's batch is spread over ranks, each works on the items whose nodes it owns.

Blocks and rows of several batches come in one relay, perhaps while the relay before is trained on. Draws go by store
id, so blocks, and with them results, are those of ``local``; weights are equal on all ranks after every step.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, sum_over_ranks
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.shared_memory import ranks_on_this_host
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.prefetch import prefetch_items
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.paging import is_mapped, spill_to_disk
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.phase_timer import COMPUTE, WAIT
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler
from gnnfleet.sharded.sampling.feature_store import FeatureStore
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.macrobatch.batch_count import WARMUP_BATCHES, WarmupSample, choose_batches_per_fetch
from gnnfleet.strategies.macrobatch.cache_policies import make_cache
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.feature_parallel import FeatureColumns
from gnnfleet.strategies.macrobatch.fetch import (
    DEGREE,
    WEIGHTED,
    BatchReader,
    FetchStats,
    MacrobatchData,
    MacrobatchFetcher,
    MacrobatchPlan,
    X,
    owned_items,
    remote_ids,
)
from gnnfleet.strategies.macrobatch.host_cache import HostCache
from gnnfleet.strategies.partitioned_strategy import PartitionedStrategy, require_shard
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sampling_options import (
    DEFAULT_FANOUT,
    AutoSwitch,
    PreparedBatch,
    check_fanouts_per_layer,
    fanouts_by_hop,
)
from gnnfleet.tasks.base import Batch, RowLookup
from gnnfleet.units import format_size


class MacrobatchStrategy(PartitionedStrategy):
    """All ranks make and call it together."""

    def __init__(self, config: MacrobatchConfig, job: Job) -> None:
        shard = require_shard(job)
        if job.model.batch_norm and job.world.size > 1:
            raise ConfigError(
                "batch norm would count rows that several workers compute more than once: use model.norm=layer, "
                "strategy sar, or one worker"
            )
        if config.split == "columns":
            _check_columns(config, job)
        self._config, self._here = config, ranks_on_this_host(job.world)
        self._memory = job.memory or memory_limit() // len(self._here)
        view = RingView.open(shard, RingExchange(job.world, 1, 1, buffers.empty_buffer))
        super().__init__(job, view, cache_inputs=self._affordable(job, config.cache_inputs))
        self._depth = self._choose_depth()
        world = _background_world(job.world) if self._depth else job.world
        ring = RingExchange(world, max(1, world.size), 0, buffers.empty_buffer)
        hops = fanouts_by_hop(config.fanouts or (DEFAULT_FANOUT,) * self.model.num_layers)
        sampler = DistNeighborSampler(view, ring, hops, replace=config.replace)
        check_fanouts_per_layer(len(sampler.hops), self.model.num_layers)
        by_columns = config.split == "columns"
        rows: dict[str, dict[str, Tensor]] = {kind: {} for kind in view.nodes} if by_columns else self._tables()
        tables = FeatureStore(rows, sampler.own, view.owners, ring, self._paged(rows))
        self.fetcher = MacrobatchFetcher(sampler, tables, job.task, self._aggregated is not None)
        self.fetcher.columns = self._columns() if by_columns else None
        # Learnable rows change in every step, so blocks read them anew instead of having them in the relay.
        for module in self.model.modules():
            if isinstance(module, NodeEmbedding) and module.ids is not None:
                module.fetch = view.for_type(module.kind if module.kind in view.nodes else self._target).gather_rows

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        _ = self.batches_per_fetch  # chosen before the clock starts
        self.fetcher.stats = FetchStats()
        started = time.perf_counter()
        with closing(self._readers(epoch, first)) as readers:
            for step, reader in enumerate(readers, first):
                loss = self._step(reader)
                yield StepRecord(epoch, step, loss, len(reader.batch.global_items), time.perf_counter() - started)
                started = time.perf_counter()

    def epoch_metrics(self) -> dict[str, float]:
        tally = self.fetcher.stats
        return {
            "relays": tally.exchanges,
            "duplication": tally.rows_read / max(tally.rows_requested, 1),
            "hit_rate": tally.hits / max(tally.rows_requested, 1),
            "megabytes_fetched": tally.fetched_bytes / 1e6,
            "waited_seconds": tally.wait_seconds,
        }

    def _step(self, reader: BatchReader) -> float:
        """The mean loss of a batch over all ranks; the weights have changed after."""
        self.model.train()
        views, columns = reader.sampled.views, self.fetcher.columns
        with autocast(self._job.precision):
            if columns is None:
                ready = self._ready(reader)
                out = self.model(views, ready.x, aggregated=ready.aggregated)
            else:
                made = columns.first_layer(self.model, reader.first, PRECISIONS[self._job.precision])
                out = self.model(views, None, made=made)
            loss = self._task.loss(self._block_taking(out, views[-1]), reader.batch)
        return self._backward_and_step(loss / len(reader.batch.global_items))

    def _readers(self, epoch: int, first: int) -> Generator[BatchReader]:
        """The batches of an epoch from ``first`` on, as their relays come in."""
        made = prefetch_items(self.fetcher.fetch_ahead(self._plans(epoch, first), self._config.lookahead), self._depth)
        with closing(made):
            while (fetched := self._next(made)) is not None:
                for place in range(len(fetched.plan.batches)):
                    yield BatchReader(self.fetcher, fetched, place)

    def _next(self, made: Generator[MacrobatchData]) -> MacrobatchData | None:
        """The next relay, waited for where a thread makes it."""
        asked = time.perf_counter()
        with self._world.clock.phase(WAIT if self._depth else COMPUTE, "relay"):
            found = next(made, None)
        self.fetcher.stats.wait_seconds += time.perf_counter() - asked
        return found

    def _plans(self, epoch: int, first: int) -> Iterator[MacrobatchPlan]:
        waiting = self.batches(epoch, first)
        while group := list(islice(waiting, self.batches_per_fetch)):
            yield self.fetcher.sample(group)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's share of the batches of an epoch; as many on all ranks, some perhaps without items."""
        seed = self._job.seed
        items = self._job.task.train_items(seed, epoch)
        mine = owned_items(self._job.task, items, self._world.rank, self._view.owners.owner_of)
        for step, every in epoch_batches(items, self._config.batch, seed=seed, epoch=epoch, first=first):
            own = every[mine[torch.searchsorted(items, every)]]
            yield self._task.batch(own, DrawKey(seed, epoch, step), every)

    @cached_property
    def batches_per_fetch(self) -> int:
        """Batches per relay; the foretaste that decides also fills the row cache's first guess."""
        config = self._config
        if config.batches_per_fetch != "auto" and not config.cache:
            return config.batches_per_fetch
        relay = self.fetcher
        total = count_batches(len(self._job.task.train_items(self._job.seed, 0)), config.batch)
        plan = relay.sample(list(islice(self.batches(0), WARMUP_BATCHES)))
        taste = WarmupSample.of(plan, relay.features)
        window, together = config.lookahead, config.batches_per_fetch
        if together == "auto":
            own = choose_batches_per_fetch(taste, config.buffer, total, ahead=self._depth, window=window)
            together = int(torch.cat(all_gather_rows(self._world, torch.tensor([[own]]))).min())
            needs = taste.bytes(together, ahead=self._depth, window=window)
            self._job.log_user(
                f"{together} of {total} batches per relay: {format_size(needs)} of {format_size(config.buffer)}"
                + (f"; a row comes once for {taste.duplication(together):.1f} uses" if taste.batch_rows else "")
            )
        if config.cache:
            relay.host_cache = self._keep(plan)
        return together

    def _keep(self, plan: MacrobatchPlan) -> HostCache:
        """Slots for rows of other machines, dealt to node types by what the foretaste wants of them; all workers of a
        machine bring their share of the memory."""
        config, tables = self._config, self.fetcher.features
        weights = {kind: tables.row_bytes(kind) for kind in tables.rows}
        ranks = self._here
        host, here = self._world.subgroup("kept rows", ranks), torch.tensor(ranks)
        if len(ranks) == self._world.size > 1:
            self._job.log_user("strategy.cache has no use here: all workers share one machine, and so its rows")

        def elsewhere(kind: str, ids: Tensor) -> Tensor:
            return ids[~torch.isin(tables.owners.owner_of(kind, ids), here)]

        needs = [len(elsewhere(kind, plan.remote_ids[kind])) * weight for kind, weight in weights.items()]
        wanted = sum_over_ranks(host, torch.tensor(needs)).tolist()
        caches = {}
        for (kind, weight), share in zip(weights.items(), wanted, strict=True):
            capacity = int(config.cache * len(ranks) * share / max(1, sum(wanted))) // max(1, weight)
            first = [elsewhere(kind, remote_ids(one, kind)) for one in plan.sampled]
            every = [torch.unique(torch.cat(all_gather_rows(host, ids))) for ids in first]
            caches[kind] = make_cache(config.policy, capacity, foretaste=every)
        return HostCache(tables, host, ranks, caches)

    def _affordable(self, job: Job, wanted: AutoSwitch) -> AutoSwitch:
        """Aggregated inputs take as much memory as features in float32: unasked only where that is a quarter of it, on
        all ranks."""
        nodes = [require_shard(job).nodes(kind).x for kind in require_shard(job).node_types]
        each = sum(len(x) * x.shape[1] * PRECISIONS[job.precision].itemsize for x in nodes if x is not None)
        if self._config.split == "columns":
            return False
        return False if wanted == "auto" and _any(job.world, each > self._memory // 4) else wanted

    def _choose_depth(self) -> int:
        """Relays ahead; the same on all ranks."""
        if self._config.prefetch != "auto":
            return self._config.prefetch
        return int(_any(self._world, len(self._here) < self._world.size))

    def _paged(self, rows: Mapping[str, Mapping[str, Tensor]]) -> frozenset[tuple[str, str]]:
        """Features that are read from the disk for every relay."""
        found = {(kind, X): tables[X] for kind, tables in rows.items() if X in tables and is_mapped(tables[X])}
        total = sum(table.nbytes for table in found.values())
        stays = self._fits_memory(total)
        if self._config.features_in_memory == "auto" and not stays:
            self._job.log_user(f"{format_size(total)} of features do not stay in memory: relays read what they need")
        return frozenset() if stays else frozenset(found)

    def _converted(self, rows: Tensor) -> Tensor:
        """Features too large for memory are converted on disk; they are read there when all of them are measured."""
        dtype = PRECISIONS[self._job.precision]
        if rows.dtype == dtype or not is_mapped(rows) or self._fits_memory(rows.numel() * dtype.itemsize):
            return super()._converted(rows)
        return spill_to_disk(rows, dtype, require_shard(self._job).bundle.path)

    def _fits_memory(self, nbytes: int) -> bool:
        """Whether so many bytes of features may be in memory."""
        return (
            nbytes <= self._memory // 2
            if self._config.features_in_memory == "auto"
            else bool(self._config.features_in_memory)
        )

    def _columns(self) -> FeatureColumns:
        """This rank's columns of all features."""
        (kind,) = self._view.nodes
        rows, x = self._view.nodes[kind], require_shard(self._job).nodes(kind).x
        assert x is not None, "checked when the strategy was made"
        degrees = {False: rows.degree(False)}
        if any(edges.weight is not None for edges in self._job.graph.edges.values()):
            degrees[True] = rows.degree(True)
        found = FeatureColumns(self._world, x, rows.node_ids, degrees, self._view.owners.counts[kind])
        columns = found.columns
        self._job.log_user(
            f"features are split by column: {columns.stop - columns.start} of {x.shape[1]} of all "
            f"{len(found.rows)} nodes on this worker, {format_size(found.nbytes)}"
        )
        return found

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """What others may read of this part's nodes."""
        shard, found = require_shard(self._job), {}
        for kind, rows in self._view.nodes.items():
            x = shard.nodes(kind).x
            found[kind] = {DEGREE: rows.degree(False)[:, None].contiguous()}
            if x is not None:
                found[kind][X] = x.contiguous()
            if any(edges.weight is not None for name, edges in self._job.graph.edges.items() if name.dst == kind):
                found[kind][WEIGHTED] = rows.degree(True)[:, None].contiguous()
        if isinstance(self._aggregated, Tensor):
            found[self._target][_AGGREGATE] = self._aggregated.contiguous()
        elif self._aggregated is not None:
            for name, near in self._aggregated.items():
                found[name.dst][str(name)] = near.contiguous()
        return found

    def _ready(self, reader: BatchReader) -> PreparedBatch:
        if isinstance(self._aggregated, Tensor):
            return PreparedBatch(reader.batch, reader.sampled.views, *self._read_both(reader, self._aggregated))
        x = {kind: self._read_x(reader, kind) for kind in reader.sampled.ids}
        near = self._read_aggregate(reader, self._aggregated)
        return PreparedBatch(reader.batch, reader.sampled.views, x if len(x) > 1 else next(iter(x.values())), near)

    def _read_both(self, reader: BatchReader, kept: Tensor) -> tuple[Tensor, Tensor]:
        """(x, aggregated) as neighbouring columns: a layer that multiplies both makes one product of them."""
        kind, dtype, width = self._target, kept.dtype, kept.shape[1]
        x = self.fetcher.features.rows[kind][X]
        both = buffers.empty_buffer((len(reader.sampled.ids[kind]), width + x.shape[1]), dtype)
        near = reader.read(kind, _AGGREGATE, out=both[:, :width])
        if torch.promote_types(x.dtype, torch.float32) == dtype:
            return reader.read(kind, X, out=both[:, width:]), near
        return both[:, width:].copy_(reader.read(kind, X)), near

    def _read_aggregate(self, reader: BatchReader, kept: Mapping[EdgeType, Tensor] | None) -> Aggregate | None:
        return None if kept is None else {name: reader.read(name.dst, str(name)) for name in kept}

    def _read_x(self, reader: BatchReader, kind: str) -> Tensor:
        dtype = PRECISIONS[self._job.precision]
        if X not in self.fetcher.features.rows[kind]:
            return torch.empty(len(reader.sampled.ids[kind]), 0, dtype=dtype)
        return reader.read(kind, X).to(dtype)

    def _block_taking(self, out: Any, view: LocalView) -> RowLookup:
        """Rows of a block's output by store id, in the precision of the loss."""

        def take(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            return view.for_type(kind).gather_rows(rows, ids).to(PRECISIONS[self._job.precision])

        return take


_AGGREGATE = "aggregate"


def _check_columns(config: MacrobatchConfig, job: Job) -> None:
    if (
        len(job.graph.nodes) > 1
        or len(job.graph.edges) > 1
        or job.graph.single_nodes.x is None
        or not job.model.supports_column_split
    ):
        raise ConfigError(
            "strategy.split=columns is for sage and gcn on nodes of one type that have features, without learnable "
            "rows, input_dropout or input_norm: use strategy.split=nodes"
        )
    if config.cache or config.cache_inputs is True:
        word = "cache" if config.cache else "cache_inputs"
        raise ConfigError(f"strategy.{word} is for features that travel; with strategy.split=columns none do")


def _any(world: World, flag: bool) -> bool:
    """Whether it holds on any rank; all of them ask."""
    return bool(sum_over_ranks(world, torch.tensor(int(flag))))


def _background_world(world: World) -> World:
    """The same ranks with connections of their own, for the thread that makes relays."""
    return world if world.size == 1 else world.subgroup("relay", range(world.size))
