"""Measure what the choice of a grid needs: every layer on one chunk, the links between workers, the cores they share.

The first rank times the layers and broadcasts the figures: clocks differ, and all ranks must choose the same grid.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_json, all_gather_numbers, barrier, broadcast_json
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.p2p import receive, send
from gnnfleet.comm.rendezvous import ProcessInfo
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.nn.base import Aggregate
from gnnfleet.nn.model import GNN
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkedPartition
from gnnfleet.sharded.pipeline.history import ChunkView, HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.sharded.pipeline.typed_chunks import join_node_types, open_chunk_view
from gnnfleet.strategies.estimates import MEMORY_SLACK, CostEstimate, PlanningContext
from gnnfleet.strategies.job import Job, autocast
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    LayerCost,
    ModelCost,
    estimate_grid,
    feasible_grids,
)
from gnnfleet.strategies.pipe.pipeline_rank import chunk_features, run_layer, should_cache_inputs
from gnnfleet.strategies.step_costs import WeightBytes, evaluation_bytes, trace_full_batch

MAX_SAMPLE_ROWS, MAX_SAMPLE_EDGES = 40_000, 1_000_000
"""Limits of the part of a chunk that layers are timed on."""

REPEATS = 3
"""Timed runs after a first one that allocates; the median counts."""

MESSAGE_ROWS, MESSAGE_WIDTH = 1 << 14, 64  # float32: 4 MiB
_TAG = 31


@dataclass(frozen=True)
class CpuShare:
    """Cores that a worker computes on, and the threads of all workers on the same cores."""

    cores: int
    threads: int  # of this worker
    threads_sharing: int  # of all workers on these cores, this one included

    @classmethod
    def detect(cls, world: World) -> CpuShare:
        """Collective. The cores of this process, and the threads of all ranks on them."""
        cores = sorted(os.sched_getaffinity(0))
        # Simulated hosts of one machine share its cores; containers have limits of their own.
        host, threads = [ProcessInfo.current().pids, cores], torch.get_num_threads()
        by_rank = all_gather_json(world, [host, threads])
        return cls(len(cores), threads, sum(count for other, count in by_rank if other == host))

    @property
    def oversubscription(self) -> float:
        """Threads per core, at least 1: the slowdown while all workers compute."""
        return max(1.0, self.threads_sharing / self.cores)

    @property
    def threads_alone(self) -> int:
        """Threads of a worker while the others wait."""
        return max(self.threads, min(self.cores, self.threads_sharing))


def check_types(job: Job) -> None:
    """Raise ConfigError for a graph of several node types unless the model has verbs for them."""
    if len(job.graph.nodes) > 1 and not isinstance(job.model, GNN):
        types = ", ".join(job.graph.nodes)
        raise ConfigError(f"strategy pipe trains built-in models on several node types, found {types}: use sar")


def chunk_loads(graph: Graph, layout: ChunkLayout) -> list[int]:
    """Rows plus in-edges of every chunk."""
    load = torch.ones(len(layout.order), dtype=torch.int64)
    for edges in join_node_types(graph).edges.values():
        load += edges.in_degree()
    before = torch.cat([load.new_zeros(1), load[layout.order].cumsum(0)])
    loads: list[int] = before[layout.starts].diff().tolist()
    return loads


def profile_cluster(world: World, cpu: CpuShare) -> ClusterProfile:
    """Collective. Time messages between neighbouring ranks while all of them send."""
    if world.size == 1:
        return ClusterProfile(oversubscription=cpu.oversubscription)
    seconds = [_message_seconds(world, rows) for rows in (1, MESSAGE_ROWS)]
    figures = zip(*all_gather_numbers(world, [*seconds, cpu.oversubscription]), strict=True)
    latency, transfer, oversubscription = map(statistics.mean, figures)
    nbytes = MESSAGE_ROWS * MESSAGE_WIDTH * 4
    return ClusterProfile(nbytes / max(transfer - latency, 1e-9), latency, oversubscription)


def _message_seconds(world: World, rows: int) -> float:
    """Median seconds until a message from the previous rank has arrived."""
    outgoing, seconds = torch.zeros(rows, MESSAGE_WIDTH), []
    for _ in range(1 + REPEATS):
        barrier(world)
        started = time.perf_counter()
        incoming = receive(world, torch.empty_like(outgoing), (world.rank - 1) % world.size, tag=_TAG, op="bandwidth")
        send(world, outgoing, (world.rank + 1) % world.size, tag=_TAG, op="bandwidth").wait()
        incoming.wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def profile_model(config: PipeConfig, job: Job, layout: ChunkLayout, cpu: CpuShare) -> ModelCost:
    """Collective. Time every layer on a sample of a chunk."""
    model = _profile_layers(config, job, layout, cpu) if job.world.is_first else None
    return TypeAdapter(ModelCost).validate_python(broadcast_json(job.world.uncounted(), asdict(model) if model else {}))


def _profile_layers(config: PipeConfig, job: Job, layout: ChunkLayout, cpu: CpuShare) -> ModelCost:
    """Time the layers on a chunk of the largest partition and on one row of it. Gradients and modes are reset."""
    rows = layout.starts[:: layout.chunks_per_partition].diff()
    partition = ChunkedPartition(join_node_types(job.graph), layout, int(rows.argmax()))
    sample = _sample_chunk(partition)
    row = Chunk(partition, sample.low, min(sample.low + 1, sample.high), -2)
    sample_costs, row_costs, speedup = _time_layers(config, job, sample), _time_layers(config, job, row), 1.0
    if cpu.threads_alone != cpu.threads:
        torch.set_num_threads(cpu.threads_alone)
        try:
            alone = sum(cost.base for cost in _time_layers(config, job, sample))
        finally:
            torch.set_num_threads(cpu.threads)
        speedup = sum(cost.base for cost in sample_costs) / max(alone, 1e-9)
    load = max(1, chunk_load(sample) - chunk_load(row))
    layers = tuple(
        replace(cost, base=fixed.base, per_load=max(0.0, cost.base - fixed.base) / load)
        for cost, fixed in zip(sample_costs, row_costs, strict=True)
    )
    # The sum of gradients also counts, for each parameter, the ranks that have one.
    sizes = {name: weight.nbytes + weight.element_size() for name, weight in job.model.named_parameters()}
    return ModelCost(layers, sizes, speedup)


def _sample_chunk(partition: ChunkedPartition) -> Chunk:
    """The largest chunk, cut to a size that takes little time."""
    chunk = max(partition.chunks, key=lambda chunk: chunk.rows)
    ends = _edges_before(partition)[chunk.low : chunk.high + 1]
    rows = int(torch.searchsorted(ends, ends[0] + MAX_SAMPLE_EDGES, right=True)) - 1
    rows = max(1, min(rows, MAX_SAMPLE_ROWS))
    return chunk if rows >= chunk.rows else Chunk(partition, chunk.low, chunk.low + rows, -3)


def _edges_before(partition: ChunkedPartition) -> Tensor:
    """[n + 1] in-edges of all rows before each row."""
    indptrs = (partition.edges[kind, "in"].indptr for kind in partition.graph.edges)
    return sum(indptrs, torch.zeros(partition.rows + 1, dtype=torch.int64))


def chunk_load(chunk: Chunk) -> int:
    """Rows plus in-edges."""
    return chunk.rows + int(_edges_before(chunk.partition)[[chunk.low, chunk.high]].diff())


def _time_layers(config: PipeConfig, job: Job, chunk: Chunk) -> list[LayerCost]:
    """Run each layer on the output of the previous one, with zeros for remote rows; ``base`` is their time."""
    partition, codec, model = chunk.partition, WireCodec(config.wire_dtype), job.model
    halo = StageHalo(World(), partition, codec)
    view = open_chunk_view(job.graph, chunk, HistoryStore(partition, halo))
    tensors = [chunk_features(job, view)]
    aggregated: Aggregate | None = None
    if should_cache_inputs(config, job):
        view.history.begin()
        aggregated = model.precompute(view.with_step(key=DrawKey()), tensors[0])
    model.eval()  # batch norm reads running statistics, which need no other rows
    costs = []
    for index in range(model.num_layers):
        model.zero_grad(set_to_none=True)
        history, seconds = HistoryStore(partition, halo), []
        history.begin()
        for slot in range(1 + REPEATS):
            started = time.perf_counter()
            step = view.in_slot(PipelineSlot(slot, (-1,)), history)
            outputs = _run_layer(job, index, step, tensors, None if index else aggregated)
            seconds.append(time.perf_counter() - started)
        names = tuple(name for name, weight in model.named_parameters() if weight.grad is not None)
        row_bytes = sum(map(codec.row_bytes, outputs)), *history.row_bytes()
        costs.append(LayerCost(statistics.median(seconds[1:]), 0.0, *row_bytes, names))
        tensors = [tensor.detach() for tensor in outputs]
    model.train()
    model.zero_grad(set_to_none=True)
    return costs


def _run_layer(
    job: Job, index: int, view: ChunkView, tensors: Sequence[Any], aggregated: Aggregate | None
) -> list[Tensor]:
    """Forward and backward from ones; (output, carry if any)."""
    rows, *carry = (tensor.detach().requires_grad_() for tensor in tensors) if index else tensors
    with autocast(job.precision):
        view = view.with_step(key=DrawKey())
        layer = run_layer(job.model, index, view, rows, carry[0] if carry else None, aggregated)
    outputs = [tensor for tensor in layer if isinstance(tensor, Tensor)]
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    view.history.restore(view.slot.slot)
    return outputs


BYTES_PER_GRAPH_EDGE, BYTES_PER_PARTITION_EDGE = 120.0, 48.0
"""Bytes of an edge of the graph while partitions are built, and of an edge of a partition and its chunks."""


def estimate(config: PipeConfig, context: PlanningContext) -> list[CostEstimate]:
    """An estimate for every feasible grid."""
    job, workers = context.job, context.workers
    config.check_task(job.task)
    check_types(job)
    layouts = context.layouts(config)
    cpu = CpuShare.detect(job.world)
    model: ModelCost = context.cached("pipe", lambda: profile_model(config, job, layouts[-1], cpu))
    grids = {GridCandidate.of(layout, workers): layout for layout in layouts}
    feasible = feasible_grids(list(grids), job.model.num_layers, batch_norm=job.model.batch_norm)
    return [_estimate_grid(config, context, model, grid, grids[grid]) for grid in feasible]


def _estimate_grid(
    config: PipeConfig, context: PlanningContext, model: ModelCost, grid: GridCandidate, layout: ChunkLayout
) -> CostEstimate:
    graph, profile = context.job.graph, context.shared_profile
    # The profile is of this process, with the cores of the machine to itself.
    oversubscription = 1.0 if context.overlaps else float(context.workers)
    cluster = ClusterProfile(profile.bandwidth, profile.latency, oversubscription)
    epoch = estimate_grid(model, grid, cluster, rows=graph.num_nodes, loads=chunk_loads(graph, layout))
    rounds = grid.chunks_per_partition * min(2, grid.stages - 1)
    if grid.graph_parallel > 1:
        exchanges = sum(layer.exchanges for layer in model.layers)
        rounds += grid.chunks_per_partition * exchanges // grid.stages + 1
    stages = ", ".join(str(len(stage)) for stage in epoch.layers)
    return CostEstimate(
        settings=config.settings_with(graph_parallel=grid.graph_parallel, chunks=grid.chunks),
        kind="exact" if grid.is_exact else "approximate",
        workers=context.workers,
        memory=max(_memory(config, context, model, grid, stage) for stage in epoch.layers),
        bytes=epoch.bytes,
        rounds=rounds,
        seconds=epoch.seconds,
        reasons=(f"{grid}, {'exact' if grid.is_exact else 'with history'}", f"layers of the stages: {stages}"),
    )


def _memory(config: PipeConfig, context: PlanningContext, model: ModelCost, grid: GridCandidate, stage: range) -> float:
    """Bytes of a worker: activations of its layers for the rows of a partition, and the history of these rows."""
    job = context.job
    graph, itemsize = job.graph, job.dtype.itemsize
    rows = graph.num_nodes / grid.graph_parallel
    halo = sum(grid.halo_rows) / 2 / grid.graph_parallel
    activations = trace_full_batch(context, "auto").peak_bytes(int(rows)) * len(stage) / job.model.num_layers
    widening = itemsize // 2 if config.wire_dtype == "bf16" else 1  # rows are sent narrower than they are stored
    tables = widening * sum(model.layers[index].forward_bytes for index in stage) * (rows + halo)
    history = tables * (2 if grid.chunks_per_partition > 1 else 1 if grid.graph_parallel > 1 else 0)
    num_features = sum(table.x.numel() for table in graph.nodes.values() if table.x is not None) / grid.graph_parallel
    aggregates = len(graph.edges) if should_cache_inputs(config, job) else 1  # one for every edge type
    features = num_features * itemsize * (2 + aggregates if stage.start == 0 else 1)
    structure = graph.num_edges * (BYTES_PER_GRAPH_EDGE + BYTES_PER_PARTITION_EDGE / grid.graph_parallel)
    peak = max(MEMORY_SLACK * activations + history, evaluation_bytes(job, rows, layerwise=False))
    base = context.shared_profile.base_memory
    return base + features + structure + peak + WeightBytes.of(job.model).state()
