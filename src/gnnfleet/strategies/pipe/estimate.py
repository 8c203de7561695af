"""What an epoch of ``pipe`` takes on every grid that fits, from layers timed on a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import Layout
from gnnfleet.strategies.estimates import SLACK, Forecast, Outlook
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.pipe import grid_planner
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import Candidate, Machine
from gnnfleet.strategies.pipe.pipeline_rank import caches_inputs
from gnnfleet.strategies.pipe.profile import Found, loads_of, try_layers
from gnnfleet.strategies.step_costs import Weights, evaluation_bytes, sketch_of


def foresee(config: PipeConfig, outlook: Outlook) -> list[Forecast]:
    job, workers = outlook.job, outlook.workers
    config.check(job.task)
    if len(job.graph.nodes) > 1:
        raise ConfigError(f"strategy pipe works on one node type, found {', '.join(job.graph.nodes)}: use sar")
    layouts = outlook.layouts(config)
    found: Found = outlook.once("pipe", lambda: _probe(config, outlook, layouts[-1]))
    forecasts = []
    for layout in layouts:
        grid = Candidate(layout.ways, workers // layout.ways, layout.chunks)
        if grid.stages <= job.model.num_layers and (grid.is_exact or not job.model.batch_norm):
            forecasts.append(_forecast(config, outlook, found, layout))
    if not forecasts:
        raise ConfigError(f"{workers} stages need as many layers, the model has {job.model.num_layers}")
    return forecasts


def rehearse(config: PipeConfig, job: Job) -> dict[str, Any]:
    """What all workers find who try the layers of a model together, on a chunk each."""
    assert job.layouts is not None
    return try_layers(config, job, job.layouts[-1]).as_json()


def _probe(config: PipeConfig, outlook: Outlook, layout: Layout) -> Found:
    """Layers on a chunk, by all workers at once; by one where each has a machine of its own."""
    if outlook.tried is not None and outlook.workers > 1:
        (said,) = outlook.tried([config])
        return Found.from_json(said)
    found, pace, workers = try_layers(config, outlook.job, layout), outlook.together, outlook.workers
    met = (workers - 1) * pace.latency
    return replace(found, machine=Machine(pace.socket, pace.latency, 1.0, workers, met))


def _forecast(config: PipeConfig, outlook: Outlook, found: Found, layout: Layout) -> Forecast:
    job, workers = outlook.job, outlook.workers
    grid = Candidate(layout.ways, workers // layout.ways, layout.chunks, layout.copies)
    loads = loads_of(job.graph, layout)
    made = grid_planner.forecast(found.of(grid), grid, found.machine, loads=loads, weights=found.weights)
    stages = range(grid.stages)
    rounds = grid.slots * min(2, grid.stages - 1)
    if layout.ways > 1:
        trips = sum(layer.trips for layer in found.work.layers)
        rounds += grid.slots * trips // grid.stages + 1
    return Forecast(
        words={
            **config.model_dump(exclude_defaults=True),
            "name": "pipe",
            "ways": layout.ways,
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


def _memory(config: PipeConfig, outlook: Outlook, found: Found, grid: Candidate, layers: range) -> float:
    """Of a stage: activations of its layers for the rows of a way, history where chunks come one after the other."""
    job, pace = outlook.job, outlook.together
    graph, itemsize = job.graph, PRECISIONS[job.precision].itemsize
    share = len(layers) / job.model.num_layers
    rows = graph.num_nodes / grid.ways
    mirrors = sum(grid.copies) / 2 / grid.ways
    tensors = sketch_of(outlook, "auto").tensors(int(rows)) * share
    written = itemsize // 2 if config.wire == "bf16" else 1  # rows travel narrower than they are kept
    tables = written * sum(found.work.layers[index].forward for index in layers) * (rows + mirrors)
    history = tables * (2 if grid.slots > 1 else 1 if grid.ways > 1 else 0)
    x = graph.nodes[next(iter(graph.nodes))].x
    wide = 0 if x is None else int(x.shape[1])
    near = len(graph.edges) if caches_inputs(config, job) else 1  # aggregates, one for every edge type
    features = rows * wide * itemsize * (2 + near if layers.start == 0 else 1)
    structure = graph.num_edges * WHOLE_EDGE + graph.num_edges / grid.ways * WAY_EDGE
    most = max(SLACK * tensors + history, evaluation_bytes(job, rows, in_pieces=False))
    return pace.resident + features + structure + most + Weights.of(job.model).state()


WHOLE_EDGE, WAY_EDGE = 120.0, 48.0
"""Bytes of an edge of the graph while its way is made, and of one of the way and its chunks."""
