"""Exact full-batch training over ranks: each has the rows and in-edges of its partition; all have equal weights.

A step runs the model on a RingView. Each rank's loss is the sum over its own items divided by the global count, so
gradients summed over ranks are those of one process. Activations are stored by the owners of their rows only.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import max_over_ranks
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.pyg.memory import PROPAGATIONS, Propagation
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.step_tracer import trace_step
from gnnfleet.strategies.batch_inputs import concat_columns
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.partitioned_strategy import PartitionedStrategy, require_shard
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import (
    MaxOverRanks,
    MemoryChoice,
    MemoryNeeds,
    choose_memory_plan,
    least_choice,
    value_or,
)


class SarStrategy(PartitionedStrategy):
    """All methods are collective, the constructor included."""

    def __init__(self, config: SarConfig, job: Job) -> None:
        shard = require_shard(job)
        config.check_task(job.task)
        self._config = config
        # Evaluation prefetches one group by default; steps may not, if memory is limited.
        group, prefetch = value_or(config.group, 1), value_or(config.prefetch, 1)
        ring = RingExchange(job.world, group, prefetch, buffers.empty_buffer)
        self._codec = WireCodec(config.wire_dtype)
        self._active_rows = self._compute_active_rows(job, replace(ring, world=job.world.uncounted()))
        view = RingView.open(shard, ring, self._active_rows)
        order = None if self._active_rows is None else self._active_rows.order
        super().__init__(job, view, cache_inputs=config.cache_inputs, order=order)
        self._aggregated, self.__dict__["_x"] = concat_columns(self._aggregated, self._x)

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # an epoch has one step
        views = self._views
        started = time.perf_counter()
        self._codec.begin_step()
        items = self._task.train_items(self._job.seed, epoch)
        count = self._count(items)
        batch = self._task.batch(items, DrawKey(self._job.seed, epoch, 0))
        self.model.train()
        with autocast(self._job.precision):
            x, aggregated = self._step_inputs
            out = self.model([view.with_step(key=batch.key) for view in views], x, aggregated=aggregated)
            lookup = self._row_lookup(out, self._view, local_only=self._task.reads_only_local_rows)
            loss = self._task.loss(lookup, batch) / count
        yield StepRecord(epoch, 0, self._backward_and_step(loss), count, time.perf_counter() - started)

    def _compute_active_rows(self, job: Job, ring: RingExchange) -> ActiveRows | None:
        """The active rows of a step's layers; None for all. Batch norm reads all rows of a layer."""
        reach = job.task.reachable_mask()
        reads_all = (job.model.batch_norm or not self._config.restrict_rows) and not job.model.is_precomputed
        if reach is None or reads_all:
            return None
        shard, target = require_shard(job), job.task.target
        loss_rows = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
        loss_rows[target] = reach[shard.nodes(target).store_ids]
        return ActiveRows.compute(shard, ring, loss_rows, job.model.num_layers)

    @cached_property
    def _views(self) -> list[RingView]:
        """The view of each layer of a step."""
        choice, active_rows = self._choose_memory_plan(), self._active_rows
        ring = RingExchange(self._world, choice.group, choice.prefetch, buffers.empty_buffer, self._codec)
        views = []
        for index in range(self.model.num_layers):
            view = self._view if active_rows is None else self._view.for_layer(active_rows, index)
            views.append(replace(view, ring=ring, keep_fetched=index in choice.cached_layers))
        return views

    def _choose_memory_plan(self) -> MemoryChoice:
        """The config's settings; ``auto`` is chosen within the memory limit. Raises ConfigError if nothing fits."""
        config, layers = self._config, range(self.model.num_layers)
        if self._job.memory is None:
            cached_layers = tuple(layers) if config.cache_for_backward is True else ()
            return MemoryChoice(value_or(config.group, 1), value_or(config.prefetch, 1), cached_layers)
        world = self._world.uncounted()
        limit, over_ranks = self._job.memory, partial(max_over_ranks, world)
        needs = self._needs_of_first_propagation(limit, over_ranks)
        choice, remark = choose_memory_plan(needs, limit, world.size, config, over_ranks)
        mode = self.model.propagation.mode if isinstance(self.model, PygModule) else ""
        self._job.log_user(remark + (f"; messages are {mode} (model.propagate)" if mode else ""))
        return choice

    def _needs_of_first_propagation(self, limit: int, over_ranks: MaxOverRanks) -> MemoryNeeds:
        """Collective. Choose the fastest propagation of a module that fits, or the smallest if none does."""
        if not isinstance(self.model, PygModule) or self.model.propagation.mode != "auto":
            return self._memory_needs()
        tried: list[tuple[float, Propagation, MemoryNeeds]] = []
        edges = sum(relation.num_edges for relation in self._view.relations.values())
        for mode in PROPAGATIONS:
            plain_bytes = tried[0][2].peak_bytes if tried else 1.0  # nearly all are of the messages of all layers
            at_once = int(limit / 20 * edges / plain_bytes)
            self.model.propagation = Propagation(mode, min(max(at_once, 1 << 12), 1 << 17))
            needs = self._memory_needs()
            tried.append((over_ranks(needs.bytes(least_choice(needs, self._config))), self.model.propagation, needs))
            if tried[-1][0] <= limit:
                break
        _, self.model.propagation, needs = min(tried, key=lambda choice: choice[0])
        return needs

    def _memory_needs(self) -> MemoryNeeds:
        is_cached = self._aggregated is not None
        with autocast(self._job.precision):
            trace = trace_step(self.model, require_shard(self._job), self._job.dtype, is_cached=is_cached)
        rows = sum(len(nodes.node_ids) for nodes in self._view.nodes.values())
        if self._active_rows is not None:  # a layer computes the rows of its level
            computed = self._active_rows.totals[1:]
            rows = int(rows * sum(computed) / len(computed) / max(1.0, float(sum(self._view.owners.counts.values()))))
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        plans = (self._view.blocks.exchange_plan(kind, "in").recv_counts for kind in self._view.nodes)
        remote_rows = sum(sum(counts) - counts[self._world.rank] for counts in plans)
        peak_bytes = (
            trace.peak_bytes(rows, remote_rows) + 3 * weights
        )  # gradients, and two moments of Adam for each weight
        return MemoryNeeds(rss(), peak_bytes, trace, lambda route: self._view.blocks.exchange_plan(*route))

    @cached_property
    def _step_inputs(self) -> tuple[Any, Aggregate | None]:
        """The inputs of the first layer of a step: the first rows of features and of their aggregate."""
        view, aggregated = self._views[0], self._aggregated
        if isinstance(aggregated, Tensor):
            aggregated = aggregated[: view.num_dst]
        elif aggregated is not None:
            aggregated = {kind: rows[: view.for_type(kind.dst).num_dst] for kind, rows in aggregated.items()}
        if isinstance(self._x, dict):
            return {kind: rows[: len(view.nodes[kind].node_ids)] for kind, rows in self._x.items()}, aggregated
        return self._x[: len(view.nodes[self._target].node_ids)], aggregated
