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

from gnnfleet.comm.collectives import gather_rows
from gnnfleet.comm.compression import Code
from gnnfleet.comm.halo_exchange import Ring
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops import buffers
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import rss
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.full_batch.active_rows import Flow
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.step_tracer import scout
from gnnfleet.strategies.input_cache import aggregate_once, side_by_side
from gnnfleet.strategies.job import PRECISIONS, Job, products
from gnnfleet.strategies.partitioned_strategy import PartsStrategy, part_of
from gnnfleet.strategies.protocol import StepRecord
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import Choice, Given, Needs, choose


class SarStrategy(PartsStrategy):
    """All ranks make and call it together."""

    def __init__(self, config: SarConfig, job: Job) -> None:
        shard = part_of(job)
        config.check(job.task)
        self._config = config
        # Evaluation fetches one group ahead of the one it works on, whatever steps may do.
        ring = Ring(job.world, _number(config.group, 1), _number(config.prefetch, 1), buffers.empty)
        self._code = Code(config.wire)
        self._flow = self._find_flow(job, replace(ring, world=replace(job.world, traffic=Traffic())))
        view = RingView.open(shard, ring, self._flow)
        order = None if self._flow is None else self._flow.order
        super().__init__(job, view, cache_inputs=config.cache_inputs, order=order)
        self._aggregated, self.__dict__["_x"] = side_by_side(self._aggregated, self._x)

    def steps(self, epoch: int, first: int = 0) -> Generator[StepRecord]:
        if first:
            return  # there is one
        views = self._views
        started = time.perf_counter()
        self._code.begin()
        items = self._task.trained(self._job.seed, epoch)
        count = self._count(items)
        batch = self._task.batch(items, DrawKey(self._job.seed, epoch, 0))
        self.model.train()
        with products(self._job.precision):
            x, near = self._step_inputs
            out = self.model([view.at(key=batch.key) for view in views], x, aggregated=near)
            loss = self._task.loss(self._taking(out, stays=self._task.stays), batch) / count
        yield StepRecord(epoch, 0, self._learn(loss), count, time.perf_counter() - started)

    def _find_flow(self, job: Job, ring: Ring) -> Flow | None:
        """Which rows the layers of a step have to compute; None for all. Batch norm looks at all rows of a layer."""
        reach = job.task.reach()
        if not self._config.flow or reach is None or job.model.batch_norm:
            return None
        shard, target = part_of(job), job.task.target
        wanted = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
        wanted[target] = reach[shard.nodes(target).store_ids]
        return Flow.find(shard, ring, wanted, job.model.num_layers)

    @cached_property
    def _views(self) -> list[RingView]:
        """What each layer of a step sees."""
        choice, layers = self._choose(), range(self.model.num_layers)
        views = [self._view if self._flow is None else self._view.of_layer(self._flow, index) for index in layers]
        ring = Ring(self._world, choice.group, choice.prefetch, buffers.empty, self._code)
        return [replace(view, ring=ring, keep=index in choice.keep) for index, view in enumerate(views)]

    def _choose(self) -> Choice:
        """How steps run: as the config says, the rest by what ``memory`` allows; raises ConfigError when nothing
        fits."""
        config, layers = self._config, range(self.model.num_layers)
        if self._job.memory is None:
            keep = tuple(layers) if config.keep is True else ()
            return Choice(_number(config.group, 1), _number(config.prefetch, 1), keep)
        given = Given(
            group=None if config.group == "auto" else config.group,
            prefetch=None if config.prefetch == "auto" else config.prefetch,
            keep=None if config.keep == "auto" else config.keep,
        )
        choice, why = choose(self._needs(), self._job.memory, self._world.size, given, self._highest)
        self._job.say(why)
        return choice

    def _needs(self) -> Needs:
        wanted, dtype = self._config.cache_inputs, PRECISIONS[self._job.precision]

        def precompute(model: Model, view: RingView, x: Any) -> Aggregate | None:
            return None if self._aggregated is None else aggregate_once(wanted, model, view, x)

        with products(self._job.precision):
            sketch = scout(self.model, part_of(self._job), dtype, precompute)
        rows = sum(len(rows.node_ids) for rows in self._view.nodes.values())
        if self._flow is not None:  # a layer holds the rows of its level
            made = self._flow.totals[1:]
            rows = int(rows * sum(made) / len(made) / max(1.0, float(sum(self._view.owners.counts.values()))))
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        # Gradients, and what Adam remembers of each weight twice.
        return Needs(rss(), sketch.tensors(rows) + 3 * weights, sketch, lambda way: self._view.part.routes(*way))

    def _highest(self, value: float) -> float:
        """Over all ranks."""
        own = torch.tensor([[value]], dtype=torch.float64)
        return float(torch.cat(gather_rows(replace(self._world, traffic=Traffic()), own)).max())

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
