"""What layers take of one worker while the others wait: on a piece of its way, on one row of it, and on the same rows
without edges.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from gnnfleet.nn.base import Model
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition
from gnnfleet.strategies.optim import make_optimizer
from gnnfleet.strategies.pipe.cpu_affinity import CpuShare, limit_threads
from gnnfleet.strategies.pipe.grid_planner import LayerCost, ModelCost
from gnnfleet.strategies.pipe.layer_bench import (
    BENCH_REPEATS,
    LayerBench,
    LayerHarness,
    measure_seconds,
    num_in_edges,
    without_edges,
)
from gnnfleet.tasks.train_options import TrainConfig

LinearFit = tuple[float, float, float]
"""Seconds of a layer for (any chunk, a row of it, an edge to it)."""


def layer_seconds(tried: LayerHarness) -> list[float]:
    """Of every layer on a chunk, all tables being there: dealt to layers by processor time, since whoever is held up is
    held up anywhere."""
    seconds, busy = [], []
    for index in range(tried.model.num_layers):
        layer = LayerBench(tried, index)
        walls, processors = zip(*(measure_seconds(layer.run) for _ in range(BENCH_REPEATS)), strict=True)
        seconds.append(statistics.median(walls))
        busy.append(statistics.median(processors))
    scale = sum(seconds) / max(sum(busy), 1e-9)
    return [each * scale for each in busy]


def per_pass_seconds(tried: LayerHarness, seconds: Sequence[float]) -> float:
    """What the first chunk of a pass takes besides, in all layers: for each row of the way."""
    first = 0.0
    for index in range(tried.model.num_layers):
        layer, found = LayerBench(tried, index), []
        for _ in range(BENCH_REPEATS):
            layer.begin()
            found.append(measure_seconds(layer.run)[0])
        first += statistics.median(found)
    return max(0.0, first - sum(seconds)) / max(1, tried.chunk.partition.rows)


def profile_alone(tried: LayerHarness, cores: CpuShare, *, single: bool) -> tuple[ModelCost, ModelCost]:
    """What layers take of this worker while the others wait: (as one of several, as a ``single`` one). That keeps no
    tables and reads no other chunk, which is a matter of rows, and has the threads of all."""
    model, trial, chunk = tried.model, tried.trial, tried.chunk
    few = chunk.partition.new_chunk(chunk.low, chunk.low + (0 if model.batch_norm else min(1, chunk.rows)), -2)
    bare, rows, edges = without_edges(chunk.partition), (chunk.rows, few.rows), (num_in_edges(chunk), num_in_edges(few))

    def on_row(way: ChunkedPartition, *, remembers: bool = True) -> list[float]:
        piece = way.new_chunk(few.low, few.high, -2)
        return (
            layer_seconds(LayerHarness(model, trial, piece, remembers=remembers))
            if few.rows
            else [0.0] * model.num_layers
        )

    def on_rows(*, remembers: bool) -> tuple[list[float], list[float], float]:
        plain = LayerHarness(model, trial, bare.new_chunk(chunk.low, chunk.high, -2), remembers=remembers)
        much = layer_seconds(plain)
        return much, on_row(bare, remembers=remembers), per_pass_seconds(plain, much)

    def work(fits: Sequence[LinearFit], once: float) -> ModelCost:
        layers = [LayerCost(*fit, *sent) for fit, sent in zip(fits, tried.bytes, strict=True)]
        return ModelCost(tuple(layers), once, _step(model, trial.train))

    *without, once = on_rows(remembers=True)
    whole = layer_seconds(tried)
    fits = fit_layer_costs(rows, edges, without, (whole, on_row(chunk.partition)))
    of_several = work(fits, once)
    if not single:
        return of_several, of_several
    *without, once = on_rows(remembers=False)
    by_rows = fit_layer_costs(rows, (0, 0), without, without)
    with limit_threads(cores.free):  # compared on the same piece
        gain = sum(layer_seconds(tried)) / max(sum(whole), 1e-9) if cores.free != cores.threads else 1.0
        both = zip(by_rows, fits, strict=True)
        return of_several, work(
            [(gain * low, gain * row, gain * edge) for (low, row, _), (_, _, edge) in both], gain * once
        )


def fit_layer_costs(
    rows: tuple[int, int],
    edges: tuple[int, int],
    without: Sequence[Sequence[float]],
    with_edges: Sequence[Sequence[float]],
) -> list[LinearFit]:
    """From what layers take on (much, little) of either."""
    found = []
    for plain, little, whole, least in zip(*without, *with_edges, strict=True):
        row = max(0.0, plain - little) / max(1, rows[0] - rows[1])
        edge = max(0.0, whole - least - row * (rows[0] - rows[1])) / max(1, edges[0] - edges[1])
        found.append((max(0.0, least - row * rows[1] - edge * edges[1]), row, edge))
    return found


def _step(model: Model, train: TrainConfig) -> float:
    """Seconds of the optimizer, on as many numbers as there are to learn."""
    twin = torch.nn.ParameterList(torch.zeros_like(each) for each in model.parameters())
    for each in twin:
        each.grad = torch.zeros_like(each)
    optimizer = make_optimizer(twin, train)
    optimizer.step()
    return statistics.median(measure_seconds(optimizer.step)[0] for _ in range(BENCH_REPEATS))
