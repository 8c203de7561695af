"""Estimate an epoch of ``pipe`` on every grid, from layers timed on one chunk."""

from __future__ import annotations

from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.strategies.estimates import MEMORY_SLACK, CostEstimate, PlanningContext
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    ModelCost,
    estimate_grid,
    feasible_grids,
)
from gnnfleet.strategies.pipe.pipeline_rank import should_cache_inputs
from gnnfleet.strategies.pipe.profile import CpuShare, chunk_loads, profile_model
from gnnfleet.strategies.step_costs import WeightBytes, evaluation_bytes, trace_full_batch

BYTES_PER_GRAPH_EDGE, BYTES_PER_PARTITION_EDGE = 120.0, 48.0
"""Bytes of an edge of the graph while partitions are built, and of an edge of a partition and its chunks."""


def estimate(config: PipeConfig, context: PlanningContext) -> list[CostEstimate]:
    """An estimate for every feasible grid."""
    job, workers = context.job, context.workers
    config.check_task(job.task)
    if len(job.graph.nodes) > 1:
        raise ConfigError(f"strategy pipe trains on one node type, found {', '.join(job.graph.nodes)}: use sar")
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
    x = graph.nodes[next(iter(graph.nodes))].x
    width = 0 if x is None else int(x.shape[1])
    aggregates = len(graph.edges) if should_cache_inputs(config, job) else 1  # one for every edge type
    features = rows * width * itemsize * (2 + aggregates if stage.start == 0 else 1)
    structure = graph.num_edges * (BYTES_PER_GRAPH_EDGE + BYTES_PER_PARTITION_EDGE / grid.graph_parallel)
    peak = max(MEMORY_SLACK * activations + history, evaluation_bytes(job, rows, layerwise=False))
    base = context.shared_profile.base_memory
    return base + features + structure + peak + WeightBytes.of(job.model).state()
