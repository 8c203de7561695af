"""The work of a rank at its position in the grid: its partition, layers, history, and the chunks of an epoch."""

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
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition, slot_of_position
from gnnfleet.sharded.pipeline.history import HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.strategies.input_cache import precompute_aggregate, should_cache_aggregate
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import GridEstimate
from gnnfleet.strategies.pipe.schedule import chunk_order
from gnnfleet.strategies.pipe.stage import LossFn, Stage, StageInputs
from gnnfleet.strategies.pipe.stage_p2p import StageLink
from gnnfleet.tasks.base import RowLookup, Task


def partition_features(job: Job, partition: ChunkedPartition, rows: slice = slice(None)) -> Tensor:
    """[·, F] features of rows of a partition, in the precision of the run."""
    nodes = job.graph.nodes[partition.node_type]
    x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
    return x[partition.store_ids[rows]].to(PRECISIONS[job.precision])


def should_cache_inputs(config: PipeConfig, job: Job) -> bool:
    """True if the first layer's aggregate is cached where the model allows it."""
    option = config.cache_inputs
    return should_cache_aggregate(option, hides=job.task.masks_edges, relations=len(job.graph.edges))


class PipelineRank:
    """Rank stage · W + partition of a grid with W graph-parallel ranks per stage. The constructor is collective.

    ``owners`` has the stages that use each parameter, ``number`` counts the grids of this run.
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
        axes = {"stage": grid.stages, "partition": grid.graph_parallel}
        self.stage_number, self.partition_number = coordinates_of_rank(rank, axes).values()
        self._partitions = job.world.subgroup(f"pipe/{number}/ways", ranks_along(rank, "partition", axes))
        self._stage_ranks = ranks_along(rank, "stage", axes)
        named = dict(job.model.named_parameters())
        self._parameters = [named[name] for name, stages in owners.items() if self.stage_number in stages]
        # Parameters that layers of several stages use get gradients from all of these stages.
        self._shared_parameters = [named[name] for name, stages in owners.items() if len(stages) > 1]
        shares = bool(self._shared_parameters)
        self._stages = job.world.subgroup(f"pipe/{number}/stages", self._stage_ranks) if shares else World()
        self.partition = ChunkedPartition(job.graph, layout, self.partition_number)
        self._open(plan.layers[self.stage_number])

    def _open(self, layers: range) -> None:
        """Create the history, the views and the stage. Evaluation exchanges exact rows and has no history."""
        config, job, grid, partition = self._config, self._job, self.grid, self.partition
        codec, exact = WireCodec(config.wire_dtype), WireCodec()
        halo, exact_halo = StageHalo(self._partitions, partition, codec), StageHalo(self._partitions, partition, exact)
        reads_remote = grid.chunks_per_partition > 1 or grid.graph_parallel > 1
        self.history = HistoryStore(partition, halo, config.gradient, is_enabled=reads_remote)
        self._chunk_views = [ChunkView.open(chunk, self.history) for chunk in partition.chunks]
        self._partition_view = (
            self._chunk_views[0] if grid.is_exact else ChunkView.open(partition.as_one_chunk, self.history)
        )
        no_history = HistoryStore(partition, exact_halo, is_enabled=False)
        self._inference_view = self._partition_view.in_slot(self._first_slot(-1), no_history)
        inputs = None if self.stage_number else self._load_inputs()
        stage = Stage(job.model, layers, self.stage_number, self.partition_number, inputs, job.precision)
        self.stage, self._inference_stage = self._linked(stage, codec), self._linked(stage, exact)

    def _linked(self, stage: Stage, codec: WireCodec) -> Stage:
        """The stage with links to the previous and the next one."""
        world, ranks, number = self._job.world, self._stage_ranks, self.stage_number
        previous_link = StageLink(world, ranks[number - 1], codec) if number else None
        next_link = None if self.is_last else StageLink(world, ranks[number + 1], codec)
        return replace(stage, previous_link=previous_link, next_link=next_link)

    def _load_inputs(self) -> StageInputs:
        x = partition_features(self._job, self.partition)
        aggregated: Aggregate | None = None
        if should_cache_inputs(self._config, self._job):
            self._inference_view.history.begin(self._first_slots)
            view = self._inference_view.with_step(training=False)
            aggregated = precompute_aggregate(self._config.cache_inputs, self._job.model, view, x)
        return StageInputs(x, aggregated)

    @property
    def _first_slots(self) -> Tensor:
        """[N] The slots of all positions if every partition is one chunk."""
        return torch.zeros(len(self.layout.order), dtype=torch.int64)

    @property
    def is_last(self) -> bool:
        return self.stage_number == self.grid.stages - 1

    @cached_property
    def task(self) -> Task:
        """The items of this partition, for the last stage."""
        return self._job.task.shard(self._partitions, {self.partition.node_type: self.partition.store_ids})

    @cached_property
    def _row_index(self) -> RowIndex:
        return RowIndex(self.partition.store_ids)

    def row_lookup(self, out: Tensor) -> RowLookup:
        """Lookup of rows of the partition's output by store id."""

        def lookup(kind: str, ids: Tensor) -> Tensor:
            return take_rows(out, self._row_index.rows(ids)).to(PRECISIONS[self._job.precision])

        return lookup

    def loss_fn(self, epoch: int, key: DrawKey, count: int) -> LossFn:
        """The loss of a step, divided by the number of items of all partitions."""
        batch = self.task.batch(self.task.train_items(self._job.seed, epoch), key)
        return lambda out: self.task.loss(self.row_lookup(out), batch) / count

    def epoch_views(self, epoch: int, *, exact: bool) -> tuple[list[ChunkView], Tensor]:
        """(the chunks of an epoch in order, the slot of each position of the layout)."""
        grid = self.grid
        if exact:
            return [self._partition_view.in_slot(self._first_slot(0 if grid.is_exact else -1))], self._first_slots
        orders = [
            chunk_order(self._job.seed, epoch, number, grid.chunks_per_partition, shuffle=self._config.shuffle)
            for number in range(grid.graph_parallel)
        ]
        views = [
            self._chunk_views[chunks[self.partition_number]].in_slot(PipelineSlot(slot, chunks))
            for slot, chunks in enumerate(zip(*orders, strict=True))
        ]
        return views, slot_of_position(orders, self.layout)

    def _first_slot(self, chunk: int) -> PipelineSlot:
        """The slot in which all partitions compute the chunk of this number."""
        return PipelineSlot(0, (chunk,) * self.grid.graph_parallel)

    def sum_gradients(self) -> None:
        """Collective. Sum gradients over the partitions of the stage, and over stages that share parameters."""
        sum_gradients(self._partitions, self._parameters)
        sum_gradients(self._stages, self._shared_parameters)

    def infer(self) -> tuple[Tensor, Tensor]:
        """Collective. (output, input of the last layer) of this partition's rows, on the last stage."""
        self._inference_view.history.begin(self._first_slots)
        return self._inference_stage.infer(self._inference_view)
