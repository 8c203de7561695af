"""What an epoch of ``pipe`` takes on every grid that fits, from layers timed on a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.strategies.estimates import MEMORY_SLACK, CostEstimate, PlanningContext
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.pipe import grid_planner
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import ClusterProfile, GridCandidate
from gnnfleet.strategies.pipe.pipeline_rank import should_cache_inputs
from gnnfleet.strategies.pipe.profile import ProfileResult, chunk_loads, profile_on_layout
from gnnfleet.strategies.step_costs import WeightBytes, evaluation_bytes, trace_full_batch


def estimate(config: PipeConfig, outlook: PlanningContext) -> list[CostEstimate]:
    job, workers = outlook.job, outlook.workers
    config.check_task(job.task)
    if len(job.graph.nodes) > 1:
        raise ConfigError(f"strategy pipe works on one node type, found {', '.join(job.graph.nodes)}: use sar")
    layouts = outlook.layouts(config)
    found: ProfileResult = outlook.cached("pipe", lambda: _probe(config, outlook, layouts[-1]))
    forecasts = []
    for layout in layouts:
        grid = GridCandidate(layout.partitions, workers // layout.partitions, layout.chunks)
        if grid.stages <= job.model.num_layers and (grid.is_exact or not job.model.batch_norm):
            forecasts.append(_forecast(config, outlook, found, layout))
    if not forecasts:
        raise ConfigError(f"{workers} stages need as many layers, the model has {job.model.num_layers}")
    return forecasts


def profile_model(config: PipeConfig, job: Job) -> dict[str, Any]:
    """What all workers find who try the layers of a model together, on a chunk each."""
    assert job.layouts is not None
    return profile_on_layout(config, job, job.layouts[-1]).as_json()


def _probe(config: PipeConfig, outlook: PlanningContext, layout: ChunkLayout) -> ProfileResult:
    """Layers on a chunk, by all workers at once; by one where each has a machine of its own."""
    if outlook.run_trials is not None and outlook.workers > 1:
        (said,) = outlook.run_trials([config])
        return ProfileResult.from_json(said)
    found, pace, workers = profile_on_layout(config, outlook.job, layout), outlook.shared_profile, outlook.workers
    met = (workers - 1) * pace.latency
    return replace(found, machine=ClusterProfile(pace.socket_bandwidth, pace.latency, 1.0, workers, met))


def _forecast(config: PipeConfig, outlook: PlanningContext, found: ProfileResult, layout: ChunkLayout) -> CostEstimate:
    job, workers = outlook.job, outlook.workers
    grid = GridCandidate(layout.partitions, workers // layout.partitions, layout.chunks, layout.halo_rows)
    loads = chunk_loads(job.graph, layout)
    made = grid_planner.estimate_grid(found.cost_of(grid), grid, found.machine, loads=loads, weights=found.weights)
    stages = range(grid.stages)
    rounds = grid.chunks_per_partition * min(2, grid.stages - 1)
    if layout.partitions > 1:
        trips = sum(layer.exchanges for layer in found.work.layers)
        rounds += grid.chunks_per_partition * trips // grid.stages + 1
    return CostEstimate(
        words={
            **config.model_dump(exclude_defaults=True),
            "name": "pipe",
            "graph_parallel": layout.partitions,
            "chunks": layout.chunks,
        },
        kind="exact" if grid.is_exact else "approximate",
        workers=workers,
        memory=max(_memory(config, outlook, found, grid, made.layers[stage]) for stage in stages),
        bytes=made.bytes,
        rounds=rounds,
        seconds=made.seconds,
        reasons=(f"{grid}, {'exact' if grid.is_exact else 'with history'}", _shares(made.layers)),
    )


def _shares(split: tuple[range, ...]) -> str:
    return "layers of the stages: " + ", ".join(str(len(each)) for each in split)


def _memory(
    config: PipeConfig, outlook: PlanningContext, found: ProfileResult, grid: GridCandidate, layers: range
) -> float:
    """Of a stage: activations of its layers for the rows of a way, history where chunks come one after the other."""
    job, pace = outlook.job, outlook.shared_profile
    graph, itemsize = job.graph, PRECISIONS[job.precision].itemsize
    share = len(layers) / job.model.num_layers
    rows = graph.num_nodes / grid.graph_parallel
    mirrors = sum(grid.halo_rows) / 2 / grid.graph_parallel
    tensors = trace_full_batch(outlook, "auto").peak_bytes(int(rows)) * share
    written = itemsize // 2 if config.wire_dtype == "bf16" else 1  # rows travel narrower than they are kept
    tables = written * sum(found.work.layers[index].forward_bytes for index in layers) * (rows + mirrors)
    history = tables * (2 if grid.chunks_per_partition > 1 else 1 if grid.graph_parallel > 1 else 0)
    x = graph.nodes[next(iter(graph.nodes))].x
    wide = 0 if x is None else int(x.shape[1])
    near = len(graph.edges) if should_cache_inputs(config, job) else 1  # aggregates, one for every edge type
    features = rows * wide * itemsize * (2 + near if layers.start == 0 else 1)
    structure = graph.num_edges * BYTES_PER_EDGE_WHOLE + graph.num_edges / grid.graph_parallel * BYTES_PER_EDGE_SPLIT
    most = max(MEMORY_SLACK * tensors + history, evaluation_bytes(job, rows, in_pieces=False))
    return pace.base_memory + features + structure + most + WeightBytes.of(job.model).state()


BYTES_PER_EDGE_WHOLE, BYTES_PER_EDGE_SPLIT = 120.0, 48.0
"""Bytes of an edge of the graph while its way is made, and of one of the way and its chunks."""
