"""What a rank works with at its place in the grid: way, layers, tables, neighbours, and the chunks of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_gradients
from gnnfleet.comm.compression import Code
from gnnfleet.comm.mesh import coordinates_of, line_of
from gnnfleet.comm.world import World
from gnnfleet.graph.partition.chunk_layout import Layout
from gnnfleet.graph.views.row_index import Places, take_rows
from gnnfleet.nn.base import Aggregate
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import Way, slots_of
from gnnfleet.sharded.pipeline.history import Stream, Turn
from gnnfleet.sharded.pipeline.stage_halo import Mirrors
from gnnfleet.strategies.input_cache import CACHED_RELATIONS, aggregate_once, wants_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import Forecast
from gnnfleet.strategies.pipe.schedule import order_of
from gnnfleet.strategies.pipe.stage import Inputs, Stage
from gnnfleet.strategies.pipe.stage_p2p import Neighbour
from gnnfleet.tasks.base import Take, Task


def features_of(job: Job, way: Way, rows: slice = slice(None)) -> Tensor:
    """[n, F] of some rows of a way."""
    nodes = job.graph.nodes[way.kind]
    x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
    return x[way.layout.order[way.low : way.high][rows]].to(PRECISIONS[job.precision])


def caches_inputs(config: PipeConfig, job: Job) -> bool:
    """Whether the first layer's aggregate is kept where the model has one: plans and runs go by the same."""
    wanted = config.cache_inputs
    few = len(job.graph.edges) <= CACHED_RELATIONS or wanted is True
    return few and wants_aggregate(wanted, hides=job.task.hides)


class Station:
    """Rank stage·W + way of a grid; all ranks of the grid make it together.

    ``owners`` says which stages use a parameter, ``number`` how many grids there were before in this run.
    """

    def __init__(
        self,
        config: PipeConfig,
        job: Job,
        plan: Forecast,
        layout: Layout,
        owners: Mapping[str, Sequence[int]],
        *,
        number: int,
    ) -> None:
        self._config, self._job, self.grid, self.layout = config, job, plan.candidate, layout
        grid, rank = self.grid, job.world.rank
        axes = {"stage": grid.stages, "way": grid.ways}
        self.stage_number, self.way_number = coordinates_of(rank, axes).values()
        self.ways = job.world.among(f"pipe/{number}/ways", line_of(rank, "way", axes))
        self._stages = line_of(rank, "stage", axes)
        named = dict(job.model.named_parameters())
        self.own = [named[name] for name, stages in owners.items() if self.stage_number in stages]
        # Parameters that layers of several stages use have gradients from all of these.
        self._tied = [named[name] for name, stages in owners.items() if len(stages) > 1]
        self._column = job.world.among(f"pipe/{number}/stages", self._stages) if self._tied else World()
        self.way = Way(job.graph, layout, self.way_number)
        self._open(plan.layers[self.stage_number])

    def _open(self, layers: range) -> None:
        """Tables, views of them, and the stage that walks these."""
        config, job, grid = self._config, self._job, self.grid
        code = Code(config.wire)
        mirrors, exact = Mirrors(self.ways, self.way, code), Mirrors(self.ways, self.way)
        remembers = grid.slots > 1 or grid.ways > 1
        self.stream = Stream(self.way, mirrors, config.gradient, remembers=remembers)
        self._views = [ChunkView.open(chunk, self.stream) for chunk in self.way.chunks]
        self._whole = self._views[0] if grid.slots == 1 else ChunkView.open(self.way.whole, self.stream)
        # Evaluation is exact on the wire too, and remembers nothing.
        self._plain = self._whole.during(self._every_way(-1), Stream(self.way, exact, remembers=False))
        ends = self._neighbour(-1, code), self._neighbour(1, code)
        self.stage = Stage(
            job.model, layers, self.stage_number, self.way_number, *ends, self._inputs(), precision=job.precision
        )
        self._exact = replace(self.stage, before=self._neighbour(-1, Code()), after=self._neighbour(1, Code()))

    def _neighbour(self, step: int, code: Code) -> Neighbour | None:
        stage = self.stage_number + step
        if not 0 <= stage < self.grid.stages:
            return None
        return Neighbour(self._job.world, self._stages[stage], code)

    def _inputs(self) -> Inputs | None:
        if self.stage_number:
            return None
        x = features_of(self._job, self.way)
        near: Aggregate | None = None
        if caches_inputs(self._config, self._job):
            self._plain.stream.begin(self._slots(None))
            near = aggregate_once(self._config.cache_inputs, self._job.model, self._plain.at(training=False), x)
        return Inputs(x, near)

    @property
    def is_last(self) -> bool:
        return self.stage_number == self.grid.stages - 1

    @cached_property
    def task(self) -> Task:
        """The items of this way, for the last stage."""
        return self._job.task.share(self.ways, {self.way.kind: self._ids})

    @property
    def _ids(self) -> Tensor:
        return self.layout.order[self.way.low : self.way.high]

    @cached_property
    def _places(self) -> Places:
        return Places(self._ids)

    def taking(self, out: Tensor) -> Take:
        """Rows of the way's output by store id."""

        def take(kind: str, ids: Tensor) -> Tensor:
            return take_rows(out, self._places.rows(ids)).to(PRECISIONS[self._job.precision])

        return take

    # -- a pass --

    def turns(self, epoch: int, *, exact: bool) -> tuple[list[ChunkView], Tensor]:
        """The chunks of an epoch in order, and when each place of the layout is worked on."""
        grid = self.grid
        if exact:
            return [self._whole.during(self._every_way(-1 if grid.slots > 1 else 0))], self._slots(None)
        shuffle, seed = self._config.shuffle, self._job.seed
        orders = [order_of(seed, epoch, way, grid.slots, shuffle=shuffle) for way in range(grid.ways)]
        turns = [Turn(slot, tuple(order[slot] for order in orders)) for slot in range(grid.slots)]
        own = orders[self.way_number]
        return [self._views[chunk].during(turn) for chunk, turn in zip(own, turns, strict=True)], self._slots(orders)

    def _every_way(self, chunk: int) -> Turn:
        return Turn(0, (chunk,) * self.grid.ways)

    def _slots(self, orders: Sequence[Sequence[int]] | None) -> Tensor:
        if orders is None or self.grid.slots == 1:
            return torch.zeros(len(self.layout.order), dtype=torch.int64)
        return slots_of(orders, self.layout)

    def sum_gradients(self) -> None:
        """Over the ways of the stage, and over stages where these share a parameter."""
        sum_gradients(self.ways, self.own)
        sum_gradients(self._column, self._tied)

    def infer(self) -> tuple[Tensor, Tensor]:
        """(output, what the last layer read) of the rows of this way, on the last stage."""
        self._plain.stream.begin(self._slots(None))
        return self._exact.infer(self._plain)
