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

from gnnfleet.comm.collectives import gather_rows, sum_over_ranks
from gnnfleet.comm.halo_exchange import Ring
from gnnfleet.comm.shared_memory import workers_here
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.sampling.batches import batches, count_batches
from gnnfleet.graph.sampling.prefetch import prefetched
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.paging import is_mapped, spill
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.phase_timer import COMPUTE, WAIT
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.dist_sampler import PartSampler
from gnnfleet.sharded.sampling.feature_store import Tables
from gnnfleet.strategies.job import PRECISIONS, Job, products
from gnnfleet.strategies.macrobatch.batch_count import FORETASTE, Foretaste, choose_together
from gnnfleet.strategies.macrobatch.cache_policies import make_cache
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.feature_parallel import Columns
from gnnfleet.strategies.macrobatch.fetch import (
    DEGREE,
    WEIGHTED,
    Fetched,
    Plan,
    Reader,
    Relay,
    Tally,
    X,
    far_ids,
    items_of,
)
from gnnfleet.strategies.macrobatch.host_cache import HostRows
from gnnfleet.strategies.partitioned_strategy import PartsStrategy, part_of
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sampling_options import FANOUT, Ready, Switch, check_layers, hops_of
from gnnfleet.tasks.base import Batch, Take
from gnnfleet.units import show_size


class MacrobatchStrategy(PartsStrategy):
    """All ranks make and call it together."""

    def __init__(self, config: MacrobatchConfig, job: Job) -> None:
        shard = part_of(job)
        if job.model.batch_norm and job.world.size > 1:
            raise ConfigError(
                "batch norm would count rows that several workers compute more than once: use model.norm=layer, "
                "strategy sar, or one worker"
            )
        if config.split == "columns":
            _check_columns(config, job)
        self._config, self._here = config, workers_here(job.world)
        self._memory = job.memory or memory_limit() // len(self._here)
        view = RingView.open(shard, Ring(job.world, 1, 1, buffers.empty))
        super().__init__(job, view, cache_inputs=self._affordable(job, config.cache_inputs))
        self._depth = self._choose_depth()
        world = _apart(job.world) if self._depth else job.world
        ring = Ring(world, max(1, world.size), 0, buffers.empty)
        hops = hops_of(config.fanouts or (FANOUT,) * self.model.num_layers)
        sampler = PartSampler(view, ring, hops, replace=config.replace)
        check_layers(len(sampler.hops), self.model.num_layers)
        by_columns = config.split == "columns"
        rows: dict[str, dict[str, Tensor]] = {kind: {} for kind in view.nodes} if by_columns else self._tables()
        tables = Tables(rows, sampler.own, view.owners, ring, self._paged(rows))
        self.relay = Relay(sampler, tables, job.task, self._aggregated is not None)
        self.relay.columns = self._columns() if by_columns else None
        # Learnable rows change in every step, so blocks read them anew instead of having them in the relay.
        for module in self.model.modules():
            if isinstance(module, NodeEmbedding) and module.ids is not None:
                module.fetch = view.of(module.kind if module.kind in view.nodes else self._target).take

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        _ = self.together  # chosen before the clock starts
        self.relay.tally = Tally()
        started = time.perf_counter()
        with closing(self._readers(epoch, first)) as readers:
            for step, reader in enumerate(readers, first):
                loss = self._step(reader)
                yield StepRecord(epoch, step, loss, len(reader.batch.every), time.perf_counter() - started)
                started = time.perf_counter()

    def counts(self) -> dict[str, float]:
        tally = self.relay.tally
        return {
            "relays": tally.relays,
            "duplication": tally.read / max(tally.wanted, 1),
            "hit_rate": tally.hits / max(tally.wanted, 1),
            "megabytes_fetched": tally.fetched_bytes / 1e6,
            "waited_seconds": tally.waited,
        }

    def _step(self, reader: Reader) -> float:
        """The mean loss of a batch over all ranks; the weights have changed after."""
        self.model.train()
        views, columns = reader.sampled.views, self.relay.columns
        with products(self._job.precision):
            if columns is None:
                ready = self._ready(reader)
                out = self.model(views, ready.x, aggregated=ready.aggregated)
            else:
                made = columns.make(self.model, reader.first, PRECISIONS[self._job.precision])
                out = self.model(views, None, made=made)
            loss = self._task.loss(self._block_taking(out, views[-1]), reader.batch)
        return self._learn(loss / len(reader.batch.every))

    def _readers(self, epoch: int, first: int) -> Generator[Reader]:
        """The batches of an epoch from ``first`` on, as their relays come in."""
        made = prefetched(self.relay.fetch_ahead(self._plans(epoch, first), self._config.foreseen), self._depth)
        with closing(made):
            while (fetched := self._next(made)) is not None:
                for place in range(len(fetched.plan.batches)):
                    yield Reader(self.relay, fetched, place)

    def _next(self, made: Generator[Fetched]) -> Fetched | None:
        """The next relay, waited for where a thread makes it."""
        asked = time.perf_counter()
        with self._world.clock.during(WAIT if self._depth else COMPUTE, "relay"):
            found = next(made, None)
        self.relay.tally.waited += time.perf_counter() - asked
        return found

    def _plans(self, epoch: int, first: int) -> Iterator[Plan]:
        waiting = self.batches(epoch, first)
        while group := list(islice(waiting, self.together)):
            yield self.relay.sample(group)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's share of the batches of an epoch; as many on all ranks, some perhaps without items."""
        seed = self._job.seed
        items = self._job.task.trained(seed, epoch)
        mine = items_of(self._job.task, items, self._world.rank, self._view.owners.of)
        for step, every in batches(items, self._config.batch, seed=seed, epoch=epoch, first=first):
            own = every[mine[torch.searchsorted(items, every)]]
            yield self._task.batch(own, DrawKey(seed, epoch, step), every)

    @cached_property
    def together(self) -> int:
        """Batches per relay; the foretaste that decides also fills the row cache's first guess."""
        config = self._config
        if config.together != "auto" and not config.cache:
            return config.together
        relay = self.relay
        total = count_batches(len(self._job.task.trained(self._job.seed, 0)), config.batch)
        plan = relay.sample(list(islice(self.batches(0), FORETASTE)))
        taste = Foretaste.of(plan, relay.tables)
        window, together = config.foreseen, config.together
        if together == "auto":
            own = choose_together(taste, config.buffer, total, ahead=self._depth, window=window)
            together = int(torch.cat(gather_rows(self._world, torch.tensor([[own]]))).min())
            needs = taste.bytes(together, ahead=self._depth, window=window)
            self._job.say(
                f"{together} of {total} batches per relay: {show_size(needs)} of {show_size(config.buffer)}"
                + (f"; a row comes once for {taste.duplication(together):.1f} uses" if taste.each else "")
            )
        if config.cache:
            relay.kept = self._keep(plan)
        return together

    def _keep(self, plan: Plan) -> HostRows:
        """Slots for rows of other machines, dealt to node types by what the foretaste wants of them; all workers of a
        machine bring their share of the memory."""
        config, tables = self._config, self.relay.tables
        weights = {kind: tables.row_bytes(kind) for kind in tables.rows}
        ranks = self._here
        host, here = self._world.among("kept rows", ranks), torch.tensor(ranks)
        if len(ranks) == self._world.size > 1:
            self._job.say("strategy.cache has no use here: all workers share one machine, and so its rows")

        def elsewhere(kind: str, ids: Tensor) -> Tensor:
            return ids[~torch.isin(tables.owners.of(kind, ids), here)]

        needs = [len(elsewhere(kind, plan.wanted[kind])) * weight for kind, weight in weights.items()]
        wanted = sum_over_ranks(host, torch.tensor(needs)).tolist()
        caches = {}
        for (kind, weight), share in zip(weights.items(), wanted, strict=True):
            capacity = int(config.cache * len(ranks) * share / max(1, sum(wanted))) // max(1, weight)
            first = [elsewhere(kind, far_ids(one, kind)) for one in plan.sampled]
            every = [torch.unique(torch.cat(gather_rows(host, ids))) for ids in first]
            caches[kind] = make_cache(config.policy, capacity, foretaste=every)
        return HostRows(tables, host, ranks, caches)

    def _affordable(self, job: Job, wanted: Switch) -> Switch:
        """Aggregated inputs take as much memory as features in float32: unasked only where that is a quarter of it, on
        all ranks."""
        nodes = [part_of(job).nodes(kind).x for kind in part_of(job).node_types]
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
        stays = self._stays(total)
        if self._config.resident == "auto" and not stays:
            self._job.say(f"{show_size(total)} of features do not stay in memory: relays read what they need")
        return frozenset() if stays else frozenset(found)

    def _converted(self, rows: Tensor) -> Tensor:
        """Features too large for memory are converted on disk; they are read there when all of them are measured."""
        dtype = PRECISIONS[self._job.precision]
        if rows.dtype == dtype or not is_mapped(rows) or self._stays(rows.numel() * dtype.itemsize):
            return super()._converted(rows)
        return spill(rows, dtype, part_of(self._job).bundle.path)

    def _stays(self, nbytes: int) -> bool:
        """Whether so many bytes of features may be in memory."""
        return nbytes <= self._memory // 2 if self._config.resident == "auto" else bool(self._config.resident)

    def _columns(self) -> Columns:
        """This rank's columns of all features."""
        (kind,) = self._view.nodes
        rows, x = self._view.nodes[kind], part_of(self._job).nodes(kind).x
        assert x is not None, "checked when the strategy was made"
        degrees = {False: rows.degree(False)}
        if any(edges.weight is not None for edges in self._job.graph.edges.values()):
            degrees[True] = rows.degree(True)
        found = Columns(self._world, x, rows.node_ids, degrees, self._view.owners.counts[kind])
        columns = found.columns
        self._job.say(
            f"features are split by column: {columns.stop - columns.start} of {x.shape[1]} of all "
            f"{len(found.rows)} nodes on this worker, {show_size(found.nbytes)}"
        )
        return found

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """What others may read of this part's nodes."""
        shard, found = part_of(self._job), {}
        for kind, rows in self._view.nodes.items():
            x = shard.nodes(kind).x
            found[kind] = {DEGREE: rows.degree(False)[:, None].contiguous()}
            if x is not None:
                found[kind][X] = x.contiguous()
            if any(edges.weight is not None for name, edges in self._job.graph.edges.items() if name.dst == kind):
                found[kind][WEIGHTED] = rows.degree(True)[:, None].contiguous()
        if isinstance(self._aggregated, Tensor):
            found[self._target][_NEAR] = self._aggregated.contiguous()
        elif self._aggregated is not None:
            for name, near in self._aggregated.items():
                found[name.dst][str(name)] = near.contiguous()
        return found

    def _ready(self, reader: Reader) -> Ready:
        if isinstance(self._aggregated, Tensor):
            return Ready(reader.batch, reader.sampled.views, *self._read_both(reader, self._aggregated))
        x = {kind: self._read_x(reader, kind) for kind in reader.sampled.ids}
        near = self._read_aggregate(reader, self._aggregated)
        return Ready(reader.batch, reader.sampled.views, x if len(x) > 1 else next(iter(x.values())), near)

    def _read_both(self, reader: Reader, kept: Tensor) -> tuple[Tensor, Tensor]:
        """(x, aggregated) as neighbouring columns: a layer that multiplies both makes one product of them."""
        kind, dtype, width = self._target, kept.dtype, kept.shape[1]
        x = self.relay.tables.rows[kind][X]
        both = buffers.empty((len(reader.sampled.ids[kind]), width + x.shape[1]), dtype)
        near = reader.read(kind, _NEAR, out=both[:, :width])
        if torch.promote_types(x.dtype, torch.float32) == dtype:
            return reader.read(kind, X, out=both[:, width:]), near
        return both[:, width:].copy_(reader.read(kind, X)), near

    def _read_aggregate(self, reader: Reader, kept: Mapping[EdgeType, Tensor] | None) -> Aggregate | None:
        return None if kept is None else {name: reader.read(name.dst, str(name)) for name in kept}

    def _read_x(self, reader: Reader, kind: str) -> Tensor:
        dtype = PRECISIONS[self._job.precision]
        if X not in self.relay.tables.rows[kind]:
            return torch.empty(len(reader.sampled.ids[kind]), 0, dtype=dtype)
        return reader.read(kind, X).to(dtype)

    def _block_taking(self, out: Any, view: LocalView) -> Take:
        """Rows of a block's output by store id, in the precision of the loss."""

        def take(kind: str, ids: Tensor) -> Tensor:
            rows: Tensor = out[kind] if isinstance(out, dict) else out
            return view.of(kind).take(rows, ids).to(PRECISIONS[self._job.precision])

        return take


_NEAR = "aggregate"


def _check_columns(config: MacrobatchConfig, job: Job) -> None:
    if len(job.graph.nodes) > 1 or len(job.graph.edges) > 1 or job.graph.only_nodes.x is None or not job.model.splits:
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


def _apart(world: World) -> World:
    """The same ranks with connections of their own, for the thread that makes relays."""
    return world if world.size == 1 else world.among("relay", range(world.size))
