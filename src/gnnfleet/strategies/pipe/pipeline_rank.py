"""The work of a rank at its position in the grid: its partition, layers, history, and the chunks of an epoch.

Its stage has consecutive layers, computed chunk by chunk, first forward and then backward. Each chunk has an autograd
graph of its own, which ends at the stage and at the tables of the history.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import sum_gradients
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.mesh import coordinates_of_rank, ranks_along
from gnnfleet.comm.p2p import PendingTransfer, receive, send
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.views.row_index import take_rows
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.phase_timer import EXCHANGE
from gnnfleet.report.timeline_svg import ChunkSpan
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition, slot_of_position
from gnnfleet.sharded.pipeline.history import ChunkView, HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import PendingTables, StageHalo, TableShapes, send_tables, table_shapes
from gnnfleet.sharded.pipeline.typed_chunks import TypedChunkView, join_node_types, open_chunk_view
from gnnfleet.strategies.batch_inputs import precompute_aggregate, should_cache_aggregate
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import GridEstimate, Owners
from gnnfleet.strategies.pipe.schedule import chunk_order
from gnnfleet.tasks.base import RowLookup, Task

PREFETCH = 2
"""Messages in flight."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHAPES_TAG = 21
_ACTIVATIONS, _GRADS = (22, "rows of a chunk"), (23, "gradients of a chunk")  # tag and name of the messages


class StageLink:
    """The connection to the previous or the next stage of the same partition."""

    def __init__(self, world: World, peer: int, codec: WireCodec) -> None:
        self._world, self._peer, self._codec = world, peer, codec
        self.shapes: TableShapes | None = None  # of all messages in both directions
        self._sending: deque[list[PendingTransfer]] = deque()

    def send_activations(self, tensors: Sequence[Tensor]) -> None:
        if self.shapes is None:
            self._send_shapes(table_shapes(tensors))
        self._send(tensors, *_ACTIVATIONS)

    def send_grads(self, tensors: Sequence[Tensor]) -> None:
        self._send(tensors, *_GRADS)

    def receive_activations(self, counts: Sequence[int]) -> Iterator[list[Tensor]]:
        """Messages of ``counts`` rows."""
        if self.shapes is None:
            self._receive_shapes()
        return self._receive(counts, *_ACTIVATIONS)

    def receive_grads(self, counts: Sequence[int]) -> Iterator[list[Tensor]]:
        """Messages of ``counts`` rows."""
        return self._receive(counts, *_GRADS)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._wait_until_pending(0)

    def _send_shapes(self, shapes: TableShapes) -> None:
        self.shapes = shapes
        fields = [len(shapes)] + [field for width, dtype in shapes for field in (width, _DTYPES.index(dtype))]
        message = torch.tensor(fields + [0] * (5 - len(fields)))
        send(self._world.uncounted(), message, self._peer, tag=_SHAPES_TAG, op="shapes of rows").wait()

    def _receive_shapes(self) -> None:
        message = torch.empty(5, dtype=torch.int64)
        pending = receive(self._world.uncounted(), message, self._peer, tag=_SHAPES_TAG, op="shapes of rows")
        count, *fields = pending.wait().tolist()
        self.shapes = [(fields[2 * index], _DTYPES[fields[2 * index + 1]]) for index in range(count)]

    def _send(self, tensors: Sequence[Tensor], tag: int, op: str) -> None:
        tables = [tensor.detach() for tensor in tensors]
        with self._world.clock.phase(EXCHANGE, op):
            self._sending.append(send_tables(self._world, self._codec, self._peer, tables, tag=tag, op=op))
            self._world.traffic.add_round()
            self._wait_until_pending(PREFETCH)

    def _wait_until_pending(self, messages: int) -> None:
        while len(self._sending) > messages:
            for transfer in self._sending.popleft():
                transfer.wait()

    def _receive(self, counts: Sequence[int], tag: int, op: str) -> Iterator[list[Tensor]]:
        def post(count: int) -> PendingTables:
            assert self.shapes is not None
            return PendingTables(self._world, self._codec, self._peer, count, self.shapes, tag=tag, op=op)

        pending = deque(map(post, counts[:PREFETCH]))
        for index in range(len(counts)):
            with self._world.clock.phase(EXCHANGE, op):
                tables = pending.popleft().wait()
                pending.extend(map(post, counts[index + PREFETCH : index + PREFETCH + 1]))
            yield tables


LossFn = Callable[[Tensor], Tensor]
"""[n, C] output of all rows of the partition → loss."""

_ChunkGraph = tuple[list[Tensor], list[Tensor]]
"""Inputs and outputs of an autograd graph."""


@dataclass(frozen=True, eq=False)
class Stage:
    model: Model
    layers: range
    number: int
    partition: int
    precision: str
    features: Callable[[ChunkView], Any] | None = None  # features of a chunk, by node type if several; first stage
    aggregated: Aggregate | None = None  # of the first layer, if it is cached
    previous_link: StageLink | None = None
    next_link: StageLink | None = None

    def run(
        self, views: Sequence[ChunkView], key: DrawKey, spans: list[ChunkSpan], *, backward: bool, loss: LossFn | None
    ) -> float:
        """Compute the chunks in order; with ``backward`` add to the gradients. Only the last stage has a ``loss``."""
        self.model.train()
        views = [view.with_step(key=key, training=True) for view in views]
        graphs, out = self._forward(views, spans, keeps_graphs=backward)
        total = 0.0
        if backward:
            if loss is not None:
                value = loss(out.requires_grad_())
                value.backward()  # type: ignore[no-untyped-call]
                total = float(value.detach())
            self._backward(views, graphs, torch.zeros_like(out) if out.grad is None else out.grad, spans)
        self._flush()
        return total

    @torch.no_grad()
    def infer(self, view: ChunkView) -> tuple[Tensor, Tensor]:
        """(output, input of the last layer) of all rows on the last stage; other stages return theirs."""
        self.model.eval()
        view = view.with_step(training=False)
        (tensors,) = self._receive_inputs([view])
        outputs, last_input = self._run_layers(view, tensors)
        if isinstance(last_input, Mapping):  # the only layer reads features
            assert isinstance(view, TypedChunkView)
            kind: Any = getattr(self.model, "target", None) or next(iter(last_input))
            last_input = view.join({kind: last_input[kind]})
        if self.next_link is not None:
            self.next_link.send_activations(outputs)
        self._flush()
        return outputs[0], last_input

    def _receive_inputs(self, views: Sequence[ChunkView]) -> Iterator[list[Tensor]]:
        """Input of each chunk: features on the first stage, activations of the previous stage on others."""
        if self.previous_link is not None:
            return self.previous_link.receive_activations([view.num_dst for view in views])
        assert self.features is not None
        return ([self.features(view)] for view in views)

    def _run_layers(self, view: ChunkView, tensors: Sequence[Any]) -> tuple[list[Tensor], Any]:
        """([output, the carried tensor if any], input of the last layer)."""
        rows: Any = tensors[0]
        carry = tensors[1] if len(tensors) > 1 else None
        last_input = rows
        with autocast(self.precision):
            for index in self.layers:
                last_input = rows
                aggregated = None if index else self._aggregated_rows(view.chunk.span)
                rows, carry = run_layer(self.model, index, view, rows, carry, aggregated)
        return [rows] if carry is None else [rows, carry], last_input

    def _aggregated_rows(self, rows: slice) -> Aggregate | None:
        if isinstance(self.aggregated, Mapping):
            return {kind: table[rows] for kind, table in self.aggregated.items()}
        return None if self.aggregated is None else self.aggregated[rows]

    def _flush(self) -> None:
        for link in (self.previous_link, self.next_link):
            if link is not None:
                link.flush()

    def _forward(
        self, views: Sequence[ChunkView], spans: list[ChunkSpan], *, keeps_graphs: bool
    ) -> tuple[list[_ChunkGraph], Tensor]:
        """(the graph of every chunk, [n, C] output of all rows on the last stage)."""
        graphs, out = [], torch.empty(0)
        with torch.set_grad_enabled(keeps_graphs):
            for view, inputs in zip(views, self._receive_inputs(views), strict=True):
                with self._record(spans, view, is_backward=False):
                    if keeps_graphs and self.features is None:
                        inputs = [tensor.requires_grad_() for tensor in inputs]
                    outputs, _ = self._run_layers(view, inputs)
                    if self.next_link is not None:
                        self.next_link.send_activations(outputs)
                    else:
                        rows = outputs[0].detach()
                        out = out if len(out) else rows.new_zeros(view.chunk.partition.rows, rows.shape[1])
                        out[view.chunk.span] = rows
                    graphs.append((inputs, outputs))
        return graphs, out

    def _backward(
        self, views: Sequence[ChunkView], graphs: list[_ChunkGraph], out_grad: Tensor, spans: list[ChunkSpan]
    ) -> None:
        """Compute gradients in reverse order; ``out_grad`` [n, C] is that of the loss, for the last stage."""
        views = views[::-1]
        if self.next_link is not None:
            grads_by_chunk = self.next_link.receive_grads([view.num_dst for view in views])
        else:
            grads_by_chunk = ([out_grad[view.chunk.span]] for view in views)
        for view, grads in zip(views, grads_by_chunk, strict=True):
            inputs, outputs = graphs.pop()
            with self._record(spans, view, is_backward=True):
                pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
                if pairs:
                    tensor_grads = [grad.to(output.dtype) for output, grad in pairs]
                    torch.autograd.backward([output for output, _ in pairs], tensor_grads)
                if self.previous_link is not None:
                    self.previous_link.send_grads([torch.zeros_like(t) if t.grad is None else t.grad for t in inputs])
                view.history.restore(view.slot.slot)

    @contextmanager
    def _record(self, spans: list[ChunkSpan], view: ChunkView, *, is_backward: bool) -> Iterator[None]:
        """Append the time of the block to ``spans``."""
        begin, begin_cpu = time.time(), time.thread_time()
        yield
        times = begin, time.time(), time.thread_time() - begin_cpu
        spans.append(ChunkSpan(self.number, self.partition, view.slot.slot, view.chunk.number, is_backward, *times))


def run_layer(
    model: Model, index: int, view: ChunkView, rows: Any, carry: Tensor | None, aggregated: Aggregate | None
) -> tuple[Tensor, Tensor | None]:
    """Run a layer; rows of several node types are one table before and after, but for the features."""
    if not isinstance(view, TypedChunkView):
        out, carry = model.layer(index, view, rows, carry, aggregated=aggregated)
        assert isinstance(out, Tensor)
        return out, carry
    by_type: Any = view.split(rows) if isinstance(rows, Tensor) else rows
    out, carry = model.layer(index, view, by_type, carry)
    target: Any = getattr(model, "target", None)
    return view.join({target: out} if isinstance(out, Tensor) else out), carry


def chunk_features(job: Job, view: ChunkView) -> Any:
    """[n, F] features of the rows of a view, in the precision of the run; by node type if there are several."""
    features = {}
    for kind, rows in view.nodes.items():
        nodes = job.graph.nodes[kind]
        x = torch.empty(nodes.count, 0) if nodes.x is None else nodes.x
        features[kind] = x[rows.node_ids].to(job.dtype)
    return features if isinstance(view, TypedChunkView) else next(iter(features.values()))


def should_cache_inputs(config: PipeConfig, job: Job) -> bool:
    """True if the first layer's aggregate is cached where the model allows it."""
    option = config.cache_inputs
    if len(job.graph.nodes) > 1:
        if option is True:
            raise ConfigError("strategy pipe caches no aggregates of several node types: remove strategy.cache_inputs")
        return False
    return should_cache_aggregate(option, job.model, hides=job.task.masks_edges, relations=len(job.graph.edges))


class PipelineRank:
    """Rank stage · W + partition of a grid with W graph-parallel ranks per stage. The constructor is collective.

    ``owners`` has the stages that use each parameter, ``number`` counts the grids of this run.
    """

    def __init__(
        self, config: PipeConfig, job: Job, plan: GridEstimate, layout: ChunkLayout, owners: Owners, number: int
    ) -> None:
        self._config, self._job, self.grid, self.layout = config, job, plan.candidate, layout
        grid, rank = self.grid, job.world.rank
        axes = {"stage": grid.stages, "partition": grid.graph_parallel}
        self.stage_number, self.partition_number = coordinates_of_rank(rank, axes).values()
        self._stage_world = job.world.subgroup(f"pipe/{number}/ways", ranks_along(rank, "partition", axes))
        self._rank_of_stage = ranks_along(rank, "stage", axes)
        named = dict(job.model.named_parameters())
        self._parameters = [named[name] for name, stages in owners.items() if self.stage_number in stages]
        # Parameters that layers of several stages use get gradients from all of these stages.
        self._shared_parameters = [named[name] for name, stages in owners.items() if len(stages) > 1]
        self._partition_world = World()
        if self._shared_parameters:
            self._partition_world = job.world.subgroup(f"pipe/{number}/stages", self._rank_of_stage)
        self.partition = ChunkedPartition(join_node_types(job.graph), layout, self.partition_number)
        self._open(plan.layers[self.stage_number])

    def _open(self, layers: range) -> None:
        """Create the history, the views and the stage. Evaluation exchanges exact rows and has no history."""
        config, job, grid, partition = self._config, self._job, self.grid, self.partition
        codec, exact = WireCodec(config.wire_dtype), WireCodec()
        halo, exact_halo = (StageHalo(self._stage_world, partition, encoding) for encoding in (codec, exact))
        reads_remote = grid.chunks_per_partition > 1 or grid.graph_parallel > 1
        self.history = HistoryStore(partition, halo, config.gradient, is_enabled=reads_remote)
        self._chunk_views = [open_chunk_view(job.graph, chunk, self.history) for chunk in partition.chunks]
        self._partition_view = (
            self._chunk_views[0] if grid.is_exact else open_chunk_view(job.graph, partition.as_one_chunk, self.history)
        )
        no_history = HistoryStore(partition, exact_halo, is_enabled=False)
        self._inference_view = self._partition_view.in_slot(self._joint_slot(-1), no_history)
        features, aggregated = (None, None) if self.stage_number else self._load_inputs()
        number, place = self.stage_number, (self.partition_number, job.precision)
        stage = Stage(job.model, layers, number, *place, features=features, aggregated=aggregated)
        self.stage, self._inference_stage = self._linked(stage, codec), self._linked(stage, exact)

    def _linked(self, stage: Stage, codec: WireCodec) -> Stage:
        world, ranks, number = self._job.world, self._rank_of_stage, self.stage_number
        previous_link = StageLink(world, ranks[number - 1], codec) if number else None
        next_link = None if self.is_last else StageLink(world, ranks[number + 1], codec)
        return replace(stage, previous_link=previous_link, next_link=next_link)

    def _load_inputs(self) -> tuple[Callable[[ChunkView], Any], Aggregate | None]:
        """(features by chunk, their aggregate if it is cached)."""
        x = chunk_features(self._job, self._partition_view)
        aggregated: Aggregate | None = None
        if should_cache_inputs(self._config, self._job):
            self._inference_view.history.begin()
            view = self._inference_view.with_step(training=False)
            aggregated = precompute_aggregate(self._config.cache_inputs, self._job.model, view, x)
        rows = self._partition_view.rows if isinstance(self._partition_view, TypedChunkView) else {}

        def features(view: ChunkView) -> Any:
            if not rows:
                return x[view.chunk.span]
            ends = torch.tensor([view.chunk.low, view.chunk.high])
            return {kind: x[kind][slice(*torch.searchsorted(rows[kind], ends).tolist())] for kind in rows}

        return features, aggregated

    @property
    def is_last(self) -> bool:
        return self.stage_number == self.grid.stages - 1

    @cached_property
    def task(self) -> Task:
        """The items of this partition, for the last stage."""
        ids = {kind: rows.node_ids for kind, rows in self._partition_view.nodes.items()}
        return self._job.task.shard(self._stage_world, ids)

    def rows_of(self, kind: str, ids: Tensor) -> Tensor:
        """Rows of store ids of a node type; those of other partitions are outside of 0 … n − 1."""
        return self.layout.position[ids + self._job.graph.node_offsets.get(kind, 0)] - self.partition.low

    def row_lookup(self, out: Tensor) -> RowLookup:
        return lambda kind, ids: take_rows(out, self.rows_of(kind, ids)).to(self._job.dtype)

    def loss_fn(self, epoch: int, key: DrawKey, count: int) -> LossFn:
        """The loss of a step, divided by the number of items of all partitions."""
        batch = self.task.batch(self.task.train_items(self._job.seed, epoch), key)
        return lambda out: self.task.loss(self.row_lookup(out), batch) / count

    def epoch_views(self, epoch: int, *, exact: bool) -> tuple[list[ChunkView], Tensor | None]:
        """(the chunks of an epoch in order, [N] slots of the positions of the layout unless all are in one slot)."""
        grid = self.grid
        if exact:
            return [self._partition_view.in_slot(self._joint_slot(0 if grid.is_exact else -1))], None
        orders = [
            chunk_order(self._job.seed, epoch, number, grid.chunks_per_partition, shuffle=self._config.shuffle)
            for number in range(grid.graph_parallel)
        ]
        views = [
            self._chunk_views[chunks[self.partition_number]].in_slot(PipelineSlot(slot, chunks))
            for slot, chunks in enumerate(zip(*orders, strict=True))
        ]
        return views, slot_of_position(orders, self.layout)

    def _joint_slot(self, chunk: int) -> PipelineSlot:
        """The slot in which all partitions compute the chunk of this number."""
        return PipelineSlot(0, (chunk,) * self.grid.graph_parallel)

    def sum_gradients(self) -> None:
        """Collective. Sum gradients over the partitions of the stage, and over stages that share parameters."""
        sum_gradients(self._stage_world, self._parameters)
        sum_gradients(self._partition_world, self._shared_parameters)

    def infer(self) -> tuple[Tensor, Tensor]:
        """Collective. (output, input of the last layer) of this partition's rows, on the last stage."""
        self._inference_view.history.begin()
        return self._inference_stage.infer(self._inference_view)
