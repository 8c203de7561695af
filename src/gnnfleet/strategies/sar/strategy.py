"""Exact full batch over ranks: each has the rows and in-edges of its part, and equal weights.

A step runs the model on a RingView; each rank's loss is the sum over its own items divided by the count of all, so
gradients summed over ranks are those of one process. Activations are on their rows' owner only.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import max_over_ranks
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.step_tracer import trace_step
from gnnfleet.strategies.input_cache import concat_columns, precompute_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job, autocast
from gnnfleet.strategies.partitioned_strategy import PartitionedStrategy, require_shard
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import MemoryChoice, MemoryNeeds, UserChoice, choose_memory_plan


class SarStrategy(PartitionedStrategy):
    """All ranks make and call it together."""

    def __init__(self, config: SarConfig, job: Job) -> None:
        shard = require_shard(job)
        config.check_task(job.task)
        self._config = config
        # Evaluation fetches one group ahead of the one it works on, whatever steps may do.
        ring = RingExchange(job.world, _number(config.group, 1), _number(config.prefetch, 1), buffers.empty_buffer)
        self._code = WireCodec(config.wire_dtype)
        self._active_rows = self._compute_active_rows(job, replace(ring, world=job.world.uncounted()))
        view = RingView.open(shard, ring, self._active_rows)
        order = None if self._active_rows is None else self._active_rows.order
        super().__init__(job, view, cache_inputs=config.cache_inputs, order=order)
        self._aggregated, self.__dict__["_x"] = concat_columns(self._aggregated, self._x)

    def train_epoch(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # there is one
        views = self._views
        started = time.perf_counter()
        self._code.begin_step()
        items = self._task.train_items(self._job.seed, epoch)
        count = self._count(items)
        batch = self._task.batch(items, DrawKey(self._job.seed, epoch, 0))
        self.model.train()
        with autocast(self._job.precision):
            x, near = self._step_inputs
            out = self.model([view.with_step(key=batch.key) for view in views], x, aggregated=near)
            loss = self._task.loss(self._taking(out, stays=self._task.reads_only_local_rows), batch) / count
        yield StepRecord(epoch, 0, self._backward_and_step(loss), count, time.perf_counter() - started)

    def _compute_active_rows(self, job: Job, ring: RingExchange) -> ActiveRows | None:
        """Which rows the layers of a step have to compute; None for all. Batch norm looks at all rows of a layer."""
        reach = job.task.reachable_mask()
        if not self._config.restrict_rows or reach is None or job.model.batch_norm:
            return None
        shard, target = require_shard(job), job.task.target
        wanted = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
        wanted[target] = reach[shard.nodes(target).store_ids]
        return ActiveRows.compute(shard, ring, wanted, job.model.num_layers)

    @cached_property
    def _views(self) -> list[RingView]:
        """What each layer of a step sees."""
        choice, layers = self._choose(), range(self.model.num_layers)
        views = [
            self._view if self._active_rows is None else self._view.for_layer(self._active_rows, index)
            for index in layers
        ]
        ring = RingExchange(self._world, choice.group, choice.prefetch, buffers.empty_buffer, self._code)
        return [
            replace(view, ring=ring, keep_fetched=index in choice.cached_layers) for index, view in enumerate(views)
        ]

    def _choose(self) -> MemoryChoice:
        """How steps run: as the config says, the rest by what ``memory`` allows; raises ConfigError when nothing
        fits."""
        config, layers = self._config, range(self.model.num_layers)
        if self._job.memory is None:
            keep = tuple(layers) if config.cache_for_backward is True else ()
            return MemoryChoice(_number(config.group, 1), _number(config.prefetch, 1), keep)
        given = UserChoice(
            group=None if config.group == "auto" else config.group,
            prefetch=None if config.prefetch == "auto" else config.prefetch,
            cached_layers=None if config.cache_for_backward == "auto" else config.cache_for_backward,
        )
        choice, why = choose_memory_plan(self._needs(), self._job.memory, self._world.size, given, self._highest)
        self._job.log_user(why)
        return choice

    def _needs(self) -> MemoryNeeds:
        wanted, dtype = self._config.cache_inputs, PRECISIONS[self._job.precision]

        def precompute(model: Model, view: RingView, x: Any) -> Aggregate | None:
            return None if self._aggregated is None else precompute_aggregate(wanted, model, view, x)

        with autocast(self._job.precision):
            sketch = trace_step(self.model, require_shard(self._job), dtype, precompute)
        rows = sum(len(rows.node_ids) for rows in self._view.nodes.values())
        if self._active_rows is not None:  # a layer holds the rows of its level
            made = self._active_rows.totals[1:]
            rows = int(rows * sum(made) / len(made) / max(1.0, float(sum(self._view.owners.counts.values()))))
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        # Gradients, and what Adam remembers of each weight twice.
        return MemoryNeeds(
            rss(), sketch.peak_bytes(rows) + 3 * weights, sketch, lambda way: self._view.blocks.exchange_plan(*way)
        )

    def _highest(self, value: float) -> float:
        """Over all ranks."""
        return max_over_ranks(self._world.uncounted(), value)

    @cached_property
    def _step_inputs(self) -> tuple[Any, Aggregate | None]:
        """What the first layer of a step reads: the first rows of features and of their aggregate."""
        first, near = self._views[0], self._aggregated
        if isinstance(near, Tensor):
            near = near[: first.num_dst]
        elif near is not None:
            near = {kind: rows[: first.num_dst_of(kind.dst)] for kind, rows in near.items()}
        if isinstance(self._x, dict):
            return {kind: rows[: len(first.nodes[kind].node_ids)] for kind, rows in self._x.items()}, near
        return self._x[: len(first.nodes[self._target].node_ids)], near


def _number(word: int | str, otherwise: int) -> int:
    return otherwise if isinstance(word, str) else word
