"""Sampled training on a partitioned graph: every rank works on the items of a batch whose nodes it owns.

Blocks and rows of several batches are fetched together, perhaps while the macrobatch before is trained on. Draws go by
store id, so blocks and results are those of ``local``. Weights are equal on all ranks after every step.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, max_over_ranks, min_over_ranks, sum_over_ranks
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.shared_memory import ranks_on_this_host
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.prefetch import prefetch_items
from gnnfleet.graph.views.view_base import COUNT, LOOPS, WEIGHTED
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import is_mapped, spill_to_disk
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.phase_timer import COMPUTE, WAIT
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler, SampledBatch
from gnnfleet.sharded.sampling.feature_store import FeatureStore
from gnnfleet.strategies.batch_inputs import X, aggregate_tables, read_inputs
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.macrobatch.cache_policies import make_cache
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.feature_parallel import FeatureColumns
from gnnfleet.strategies.macrobatch.fetch import (
    DEGREE_TABLES,
    WARMUP_BATCHES,
    BatchReader,
    BatchSampler,
    FetchStats,
    MacrobatchData,
    MacrobatchFetcher,
    WarmupSample,
    choose_batches_per_fetch,
    owned_items,
)
from gnnfleet.strategies.macrobatch.host_cache import HostCache
from gnnfleet.strategies.partitioned_strategy import PartitionedStrategy, require_shard
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sampling_options import AutoSwitch, check_fanouts_per_layer, parse_fanouts
from gnnfleet.tasks.base import Batch
from gnnfleet.units import format_size


class MacrobatchStrategy(PartitionedStrategy):
    """All methods are collective, the constructor included."""

    def __init__(self, config: MacrobatchConfig, job: Job) -> None:
        shard = require_shard(job)
        if job.model.batch_norm and job.world.size > 1:
            raise ConfigError(
                "batch norm would count rows that several workers compute more than once: use model.norm=layer, "
                "strategy sar, or one worker"
            )
        if config.split == "columns":
            _check_columns(config, job)
        self._config, self._host_ranks = config, ranks_on_this_host(job.world)
        self._memory = config.feature_memory or job.memory or memory_limit() // len(self._host_ranks)
        view = RingView.open(shard, RingExchange(job.world, 1, 1, buffers.empty_buffer))
        super().__init__(job, view, cache_inputs=self._choose_cache_inputs(job, config.cache_inputs))
        self._depth = self._choose_depth()
        world = job.world
        if self._depth and world.size > 1:  # the thread that prefetches has connections of its own
            world = world.subgroup("relay", range(world.size))
        ring = RingExchange(world, max(1, world.size), 0, buffers.empty_buffer)
        hops = parse_fanouts(config.fanouts, self.model.num_layers)
        sampler = DistNeighborSampler(view, ring, hops, replace=config.replace)
        check_fanouts_per_layer(len(sampler.hops), self.model.num_layers)
        by_columns = config.split == "columns"
        tables: dict[str, dict[str, Tensor]] = {kind: {} for kind in view.nodes} if by_columns else self._tables()
        self._sampler = BatchSampler(sampler, job.task, skips_last_hop=self._aggregated is not None)
        self._features = FeatureStore(tables, sampler.own_nodes, view.owners, ring, self._paged(tables))
        self._columns = self._redistribute_columns() if by_columns else None
        self.stats = FetchStats()
        self._wait_seconds = 0.0
        # Learnable rows change in every step, so blocks read them anew instead of from a fetch.
        for module in self.model.modules():
            if isinstance(module, NodeEmbedding) and module.ids is not None:
                module.fetch = view.for_type(module.kind if module.kind in view.nodes else self._target).gather_rows

    @cached_property
    def steps_per_epoch(self) -> int:
        return max(1, count_batches(len(self._job.task.train_items(self._job.seed, 0)), self._config.batch))

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        fetcher = self.fetcher  # sampling for its choices is no part of the first step's time
        self.stats, self._wait_seconds = FetchStats(), 0.0
        step, started = first, time.perf_counter()
        batches = self.batches(epoch, first)
        with closing(prefetch_items(fetcher.macrobatches(batches), self._depth)) as macrobatches:
            while (macrobatch := self._next(macrobatches)) is not None:
                self.stats += macrobatch.stats
                for reader in fetcher.readers(macrobatch):
                    loss = self._step(reader)
                    yield StepRecord(epoch, step, loss, len(reader.batch.global_items), time.perf_counter() - started)
                    step, started = step + 1, time.perf_counter()

    def epoch_metrics(self) -> dict[str, float]:
        stats = self.stats
        return {
            "relays": stats.exchanges,
            "duplication": stats.rows_read / max(stats.rows_requested, 1),
            "hit_rate": stats.hits / max(stats.rows_requested, 1),
            "megabytes_fetched": stats.fetched_bytes / 1e6,
            "waited_seconds": self._wait_seconds,
        }

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's share of the batches of an epoch; all ranks have the same number, some perhaps without items."""
        seed = self._job.seed
        items = self._job.task.train_items(seed, epoch)
        is_owned = owned_items(self._job.task, items, self._world.rank, self._view.owners.owner_of)
        for step, global_items in epoch_batches(items, self._config.batch, seed=seed, epoch=epoch, first=first):
            local_items = global_items[is_owned[torch.searchsorted(items, global_items)]]
            yield self._task.batch(local_items, DrawKey(seed, epoch, step), global_items)

    def _next(self, macrobatches: Generator[MacrobatchData]) -> MacrobatchData | None:
        asked = time.perf_counter()
        with self._world.clock.phase(WAIT if self._depth else COMPUTE, "relay"):
            macrobatch = next(macrobatches, None)
        self._wait_seconds += time.perf_counter() - asked
        return macrobatch

    def _step(self, reader: BatchReader) -> float:
        """Take one optimizer step; the mean loss of the batch over all ranks."""
        self.model.train()
        views, dtype = reader.sampled.views, self._job.dtype
        with autocast(self._job.precision):
            if self._columns is None:
                tables = self._features.rows
                features = {kind: tables[kind][X] for kind in tables if X in tables[kind]}
                inputs = read_inputs(
                    reader.batch, views, reader.read, features=features, aggregated=self._aggregated, dtype=dtype
                )
                out = self.model(views, inputs.x, aggregated=inputs.aggregated)
            else:
                out = self.model(
                    views, None, precomputed_product=self._columns.first_layer(self.model, reader.first_blocks, dtype)
                )
            loss = self._task.loss(self._row_lookup(out, views[-1]), reader.batch)
        return self._backward_and_step(loss / len(reader.batch.global_items))

    # -- the fetcher --

    @cached_property
    def fetcher(self) -> MacrobatchFetcher:
        """The fetcher with its cache. Built before the first step: evaluation needs none."""
        config, host_cache = self._config, None
        batches_per_fetch = config.batches_per_fetch
        if batches_per_fetch == "auto" or config.cache:
            sampled = self._sampler.sample(list(islice(self.batches(0), WARMUP_BATCHES)))
            if batches_per_fetch == "auto":
                batches_per_fetch = self._choose_batches_per_fetch(sampled)
            if config.cache:
                host_cache = self._make_host_cache(sampled)
        return MacrobatchFetcher(
            self._sampler, self._features, batches_per_fetch, config.lookahead, host_cache, self._columns
        )

    def _choose_batches_per_fetch(self, sampled: Sequence[SampledBatch]) -> int:
        """The number of batches that fits into the buffer of every rank."""
        config, columns, world = self._config, self._columns, self._features.ring.world
        first_blocks = () if columns is None else columns.exchange_blocks(world, sampled)
        warmup = WarmupSample.of(sampled, first_blocks, self._features)
        total = count_batches(len(self._job.task.train_items(self._job.seed, 0)), config.batch)
        ahead = {"prefetch": self._depth, "lookahead": config.lookahead}
        batches = int(min_over_ranks(self._world, choose_batches_per_fetch(warmup, config.buffer, total, **ahead)))
        uses = f". Each fetched row is used {warmup.duplication(batches):.1f} times on average"
        self._job.log_user(
            f"fetching {batches} of {total} batches per exchange ({format_size(warmup.bytes(batches, **ahead))} of a "
            f"{format_size(config.buffer)} buffer)" + (uses if warmup.batch_rows else "")
        )
        return batches

    def _make_host_cache(self, sampled: Sequence[SampledBatch]) -> HostCache:
        """The cache for rows of other hosts. Its memory is the sum over the workers of this host; node types share it
        in proportion to the bytes that the warm-up batches request of them."""
        config, features, ranks = self._config, self._features, self._host_ranks
        row_bytes = {kind: features.row_bytes(kind) for kind in features.rows}
        host, host_ranks = self._world.subgroup("kept rows", ranks), torch.tensor(ranks)
        if len(ranks) == self._world.size > 1:
            self._job.log_user("strategy.cache has no effect: it keeps rows of other hosts, and all workers share one")

        def remote_ids(batch: SampledBatch, kind: str) -> Tensor:
            ids = batch.remote_ids(kind)
            return ids[~torch.isin(features.owners.owner_of(kind, ids), host_ranks)]

        requests = {kind: [remote_ids(batch, kind) for batch in sampled] for kind in row_bytes}
        nbytes = torch.tensor([len(torch.unique(torch.cat(requests[kind]))) * row_bytes[kind] for kind in row_bytes])
        shares = sum_over_ranks(host, nbytes).tolist()
        caches = {}
        for (kind, width), share in zip(row_bytes.items(), shares, strict=True):
            capacity = int(config.cache * len(ranks) * share / max(1, sum(shares))) // max(1, width)
            warmup = [torch.unique(torch.cat(all_gather_rows(host, ids))) for ids in requests[kind]]
            caches[kind] = make_cache(config.policy, capacity, warmup=warmup)
        return HostCache(features, host, ranks, caches)

    # -- memory --

    def _choose_cache_inputs(self, job: Job, option: AutoSwitch) -> AutoSwitch:
        """Cached aggregates take as much memory as features in the run's precision: ``auto`` allows a quarter of the
        memory on every rank."""
        nodes = [require_shard(job).nodes(kind).x for kind in require_shard(job).node_types]
        nbytes = sum(len(x) * x.shape[1] * job.dtype.itemsize for x in nodes if x is not None)
        if self._config.split == "columns":
            return False
        return False if option == "auto" and _any(job.world, nbytes > self._memory // 4) else option

    def _choose_depth(self) -> int:
        """The number of macrobatches to prefetch; the same on all ranks."""
        if self._config.prefetch != "auto":
            return self._config.prefetch
        return int(_any(self._world, len(self._host_ranks) < self._world.size))

    def _paged(self, tables: Mapping[str, Mapping[str, Tensor]]) -> frozenset[tuple[str, str]]:
        """The tables of features that are read from disk in every fetch."""
        mapped = {(kind, X): by_name[X] for kind, by_name in tables.items() if X in by_name and is_mapped(by_name[X])}
        total = sum(table.nbytes for table in mapped.values())
        fits = self._fits_memory(total)
        if self._config.features_in_memory == "auto" and not fits:
            self._job.log_user(
                f"features take {format_size(total)}, more than half of the memory: every fetch reads its rows on disk"
            )
        return frozenset() if fits else frozenset(mapped)

    def _converted(self, rows: Tensor) -> Tensor:
        """Convert features that are too large for memory on disk; evaluation reads them there."""
        dtype = self._job.dtype
        if rows.dtype == dtype or not is_mapped(rows) or self._fits_memory(rows.numel() * dtype.itemsize):
            return super()._converted(rows)
        return spill_to_disk(rows, dtype, require_shard(self._job).bundle.path)

    def _fits_memory(self, nbytes: int) -> bool:
        if self._config.features_in_memory == "auto":
            return nbytes <= self._memory // 2
        return bool(self._config.features_in_memory)

    # -- tables --

    def _redistribute_columns(self) -> FeatureColumns:
        (kind,) = self._view.nodes
        x = require_shard(self._job).nodes(kind).x
        assert x is not None, "checked when the strategy was built"
        columns = FeatureColumns(
            self._world, x, self._view.nodes[kind].node_ids, self._degrees(kind), self._view.owners.counts[kind]
        )
        self._job.log_user(
            f"feature-parallel: this worker holds {columns.rows.shape[1]} of {x.shape[1]} feature columns for all "
            f"{len(columns.rows):,} nodes ({format_size(columns.nbytes)})"
        )
        return columns

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """The tables that other ranks read rows of this partition from."""
        shard, tables = require_shard(self._job), dict[str, dict[str, Tensor]]()
        for kind in self._view.nodes:
            x, degrees = shard.nodes(kind).x, self._degrees(kind)
            tables[kind] = {DEGREE_TABLES[number]: degree[:, None].contiguous() for number, degree in degrees.items()}
            if x is not None:
                tables[kind][X] = x.contiguous()
        for kind, name, rows in aggregate_tables(self._aggregated, self._target):
            tables[kind][name] = rows.contiguous()
        return tables

    def _degrees(self, kind: str) -> dict[int, Tensor]:
        """Collective. Weighted degrees only if an edge type into ``kind`` has weights, self-loops only if any exist."""
        rows, edges = self._view.nodes[kind], self._job.graph.edges
        has_weights = any(table.weight is not None for name, table in edges.items() if name.dst == kind)
        degrees = {number: rows.degree(number) for number in ((COUNT, WEIGHTED, LOOPS) if has_weights else (COUNT,))}
        if has_weights and not max_over_ranks(self._world, float((~degrees[LOOPS].isnan()).any())):
            del degrees[LOOPS]
        return degrees


def _check_columns(config: MacrobatchConfig, job: Job) -> None:
    if (
        len(job.graph.nodes) > 1
        or len(job.graph.edges) > 1
        or job.graph.single_nodes.x is None
        or not job.model.supports_column_split
    ):
        raise ConfigError(
            "strategy.split=columns supports sage and gcn on nodes of one type with features, without edge features in "
            "sage (model.edge_features=false), learnable rows, input_dropout or input_norm: use strategy.split=nodes"
        )
    if config.cache or config.cache_inputs is True:
        option = "cache" if config.cache else "cache_inputs"
        raise ConfigError(
            f"strategy.{option} has no effect with strategy.split=columns, which fetches no features: leave it out"
        )


def _any(world: World, flag: bool) -> bool:
    """Collective. True if the flag is set on any rank."""
    return bool(sum_over_ranks(world, torch.tensor(int(flag))))
