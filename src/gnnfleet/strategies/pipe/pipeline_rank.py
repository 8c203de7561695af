"""What a rank works with at its place in the grid: way, layers, tables, neighbours, and the chunks of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_gradients
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.mesh import coordinates_of_rank, ranks_along
from gnnfleet.comm.world import World
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.views.row_index import RowIndex, take_rows
from gnnfleet.nn.base import Aggregate
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition, slot_of_position
from gnnfleet.sharded.pipeline.history import HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.strategies.input_cache import MAX_CACHED_RELATIONS, precompute_aggregate, should_cache_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import GridEstimate
from gnnfleet.strategies.pipe.schedule import chunk_order
from gnnfleet.strategies.pipe.stage import Stage, StageInputs
from gnnfleet.strategies.pipe.stage_p2p import StageLink
from gnnfleet.tasks.base import RowLookup, Task


def partition_features(job: Job, way: ChunkedPartition, rows: slice = slice(None)) -> Tensor:
    """[n, F] of some rows of a way."""
    nodes = job.graph.nodes[way.kind]
    x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
    return x[way.layout.order[way.low : way.high][rows]].to(PRECISIONS[job.precision])


def should_cache_inputs(config: PipeConfig, job: Job) -> bool:
    """Whether the first layer's aggregate is kept where the model has one: plans and runs go by the same."""
    wanted = config.cache_inputs
    few = len(job.graph.edges) <= MAX_CACHED_RELATIONS or wanted is True
    return few and should_cache_aggregate(wanted, hides=job.task.masks_edges)


class PipelineRank:
    """Rank stage·W + way of a grid; all ranks of the grid make it together.

    ``owners`` says which stages use a parameter, ``number`` how many grids there were before in this run.
    """

    def __init__(
        self,
        config: PipeConfig,
        job: Job,
        plan: GridEstimate,
        layout: ChunkLayout,
        owners: Mapping[str, Sequence[int]],
        *,
        number: int,
    ) -> None:
        self._config, self._job, self.grid, self.layout = config, job, plan.candidate, layout
        grid, rank = self.grid, job.world.rank
        axes = {"stage": grid.stages, "way": grid.graph_parallel}
        self.stage_number, self.partition_number = coordinates_of_rank(rank, axes).values()
        self.partitions = job.world.subgroup(f"pipe/{number}/ways", ranks_along(rank, "way", axes))
        self._stages = ranks_along(rank, "stage", axes)
        named = dict(job.model.named_parameters())
        self.own = [named[name] for name, stages in owners.items() if self.stage_number in stages]
        # Parameters that layers of several stages use have gradients from all of these.
        self._shared_parameters = [named[name] for name, stages in owners.items() if len(stages) > 1]
        self._column = job.world.subgroup(f"pipe/{number}/stages", self._stages) if self._shared_parameters else World()
        self.partition = ChunkedPartition(job.graph, layout, self.partition_number)
        self._open(plan.layers[self.stage_number])

    def _open(self, layers: range) -> None:
        """Tables, views of them, and the stage that walks these."""
        config, job, grid = self._config, self._job, self.grid
        code = WireCodec(config.wire_dtype)
        mirrors, exact = StageHalo(self.partitions, self.partition, code), StageHalo(self.partitions, self.partition)
        remembers = grid.chunks_per_partition > 1 or grid.graph_parallel > 1
        self.history = HistoryStore(self.partition, mirrors, config.gradient, remembers=remembers)
        self._views = [ChunkView.open(chunk, self.history) for chunk in self.partition.chunks]
        self._whole = (
            self._views[0]
            if grid.chunks_per_partition == 1
            else ChunkView.open(self.partition.as_one_chunk, self.history)
        )
        # Evaluation is exact on the wire too, and remembers nothing.
        self._plain = self._whole.in_slot(self._every_way(-1), HistoryStore(self.partition, exact, remembers=False))
        ends = self._stage_link(-1, code), self._stage_link(1, code)
        self.stage = Stage(
            job.model, layers, self.stage_number, self.partition_number, *ends, self._inputs(), precision=job.precision
        )
        self._exact = replace(
            self.stage, previous_link=self._stage_link(-1, WireCodec()), next_link=self._stage_link(1, WireCodec())
        )

    def _stage_link(self, step: int, code: WireCodec) -> StageLink | None:
        stage = self.stage_number + step
        if not 0 <= stage < self.grid.stages:
            return None
        return StageLink(self._job.world, self._stages[stage], code)

    def _inputs(self) -> StageInputs | None:
        if self.stage_number:
            return None
        x = partition_features(self._job, self.partition)
        near: Aggregate | None = None
        if should_cache_inputs(self._config, self._job):
            self._plain.history.begin(self._slots(None))
            near = precompute_aggregate(
                self._config.cache_inputs, self._job.model, self._plain.with_step(training=False), x
            )
        return StageInputs(x, near)

    @property
    def is_last(self) -> bool:
        return self.stage_number == self.grid.stages - 1

    @cached_property
    def task(self) -> Task:
        """The items of this way, for the last stage."""
        return self._job.task.shard(self.partitions, {self.partition.kind: self._ids})

    @property
    def _ids(self) -> Tensor:
        return self.layout.order[self.partition.low : self.partition.high]

    @cached_property
    def _places(self) -> RowIndex:
        return RowIndex(self._ids)

    def row_lookup(self, out: Tensor) -> RowLookup:
        """Rows of the way's output by store id."""

        def take(kind: str, ids: Tensor) -> Tensor:
            return take_rows(out, self._places.rows(ids)).to(PRECISIONS[self._job.precision])

        return take

    # -- a pass --

    def slots(self, epoch: int, *, exact: bool) -> tuple[list[ChunkView], Tensor]:
        """The chunks of an epoch in order, and when each place of the layout is worked on."""
        grid = self.grid
        if exact:
            return [self._whole.in_slot(self._every_way(-1 if grid.chunks_per_partition > 1 else 0))], self._slots(None)
        shuffle, seed = self._config.shuffle, self._job.seed
        orders = [
            chunk_order(seed, epoch, way, grid.chunks_per_partition, shuffle=shuffle)
            for way in range(grid.graph_parallel)
        ]
        turns = [
            PipelineSlot(slot, tuple(order[slot] for order in orders)) for slot in range(grid.chunks_per_partition)
        ]
        own = orders[self.partition_number]
        return [self._views[chunk].in_slot(turn) for chunk, turn in zip(own, turns, strict=True)], self._slots(orders)

    def _every_way(self, chunk: int) -> PipelineSlot:
        return PipelineSlot(0, (chunk,) * self.grid.graph_parallel)

    def _slots(self, orders: Sequence[Sequence[int]] | None) -> Tensor:
        if orders is None or self.grid.chunks_per_partition == 1:
            return torch.zeros(len(self.layout.order), dtype=torch.int64)
        return slot_of_position(orders, self.layout)

    def sum_gradients(self) -> None:
        """Over the ways of the stage, and over stages where these share a parameter."""
        sum_gradients(self.partitions, self.own)
        sum_gradients(self._column, self._shared_parameters)

    def infer(self) -> tuple[Tensor, Tensor]:
        """(output, what the last layer read) of the rows of this way, on the last stage."""
        self._plain.history.begin(self._slots(None))
        return self._exact.infer(self._plain)
