"""Layers that are run time and again on a piece of a way, so that a clock can be held to them.

What a run makes once, and what a pass makes once, is there before clocks start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, ChunkedPartition
from gnnfleet.sharded.pipeline.history import HistoryStore, PipelineSlot
from gnnfleet.sharded.pipeline.stage_halo import StageHalo
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.step_costs import SAMPLE_EDGES, SAMPLE_ROWS
from gnnfleet.tasks.train_options import TrainConfig

BENCH_REPEATS = 3
"""Of everything that is timed; the median counts."""


@dataclass(frozen=True)
class BenchSetup:
    """What layers are tried on: a way, and how they will be computed."""

    partition: ChunkedPartition
    features: Callable[[slice], Tensor]  # of some of its rows: no more are read than are needed
    precision: str
    cached: bool  # whether the first layer's aggregate will be kept
    codec: WireCodec  # how rows travel
    train: TrainConfig


class LayerHarness:
    """The layers of a model on a chunk, neighbours elsewhere being rows of zeros; each has been run once. ``uses_history``
    as of ``HistoryStore``."""

    def __init__(self, model: Model, trial: BenchSetup, chunk: Chunk, *, remembers: bool = True) -> None:
        self.model, self.trial, self.chunk, self.uses_history = model, trial, chunk, remembers
        self.mirrors = StageHalo(World(), chunk.partition, trial.codec)
        self.view = ChunkView.open(chunk, HistoryStore(chunk.partition, self.mirrors))
        self.given: list[list[Tensor]] = [[trial.features(chunk.span)]]  # what each layer reads
        self.near: Aggregate | None = None
        self.parameters: list[frozenset[str]] = []
        self.bytes: list[tuple[int, int, int, int]] = []  # (made, forward, by_source, home) as of ``LayerCost``
        model.train()
        if trial.cached:
            self.view.history.begin(self.slots)
            self.near = model.precompute(self.view.with_step(key=DrawKey()), self.given[0][0])
            self.view.history.history.clear()
        for index in range(model.num_layers):
            model.zero_grad(set_to_none=True)
            layer = LayerBench(self, index)
            self.given.append([tensor.detach() for tensor in layer.made])
            names = [name for name, weight in model.named_parameters() if weight.grad is not None]
            self.parameters.append(frozenset(names))
            self.bytes.append((sum(map(trial.codec.row_bytes, layer.made)), *layer.stream.widths()))

    @property
    def slots(self) -> Tensor:
        return torch.zeros(len(self.chunk.partition.layout.order), dtype=torch.int64)


class LayerBench:
    """A layer that is run time and again, a chunk after the other of a pass; its tables are there after the first."""

    def __init__(self, tried: LayerHarness, index: int) -> None:
        self._tried, self._index = tried, index
        self.stream = HistoryStore(tried.chunk.partition, tried.mirrors, remembers=tried.uses_history)
        self.made: list[Tensor] = []
        self._slot = 0
        self.begin()
        self.run()

    def begin(self) -> None:
        """A pass begins: it makes some of its tables anew."""
        self.stream.begin(self._tried.slots)

    def run(self, then: Callable[[], object] = lambda: None) -> None:
        """Forward and backward, ``then`` after each."""
        tried, index = self._tried, self._index
        self._slot += 1
        view = tried.view.in_slot(PipelineSlot(self._slot, (-1,)), self.stream).with_step(key=DrawKey())
        given = [tensor.detach().requires_grad_(index > 0) for tensor in tried.given[index]]
        near = tried.near if index == 0 else None
        with autocast(tried.trial.precision):
            out = tried.model.layer(index, view, given[0], given[1] if len(given) > 1 else None, aggregated=near)
        self.made = [tensor for tensor in out if isinstance(tensor, Tensor)]
        then()
        ends = [tensor for tensor in self.made if tensor.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        self.stream.restore(self._slot)
        then()


def measure_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds (by the clock, of processor time)."""
    started, busy = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - started, time.thread_time() - busy


# -- pieces --


def pick_chunk(way: ChunkedPartition, number: int) -> Chunk:
    """One with rows, if there is one."""
    chunk = way.chunks[number % len(way.chunks)]
    return chunk if chunk.rows else max(way.chunks, key=lambda each: each.rows)


def limit_chunk(way: ChunkedPartition, chunk: Chunk) -> Chunk:
    """No more of a chunk than tells what all of it takes."""
    ends = _edges_before(way)[chunk.low : chunk.high + 1]
    rows = int(torch.searchsorted(ends, ends[0] + SAMPLE_EDGES, right=True)) - 1
    rows = max(1, min(rows, SAMPLE_ROWS))
    return chunk if rows >= chunk.rows else way.new_chunk(chunk.low, chunk.low + rows, -3)


def _edges_before(way: ChunkedPartition) -> Tensor:
    """[n + 1] in-edges of all rows before each."""
    found = torch.zeros(way.rows + 1, dtype=torch.int64)
    for kind in way.graph.edges:
        found += way.edges(kind, "in").indptr
    return found


def num_in_edges(chunk: Chunk) -> int:
    """In-edges of its rows."""
    return int(_edges_before(chunk.partition)[[chunk.low, chunk.high]].diff())


def without_edges(way: ChunkedPartition) -> ChunkedPartition:
    edges = {}
    for kind, each in way.graph.edges.items():
        weight, attr = (None if values is None else values[:0] for values in (each.weight, each.attr))
        edges[kind] = Edges(indptr=torch.zeros_like(each.indptr), src=each.src[:0], weight=weight, attr=attr)
    return ChunkedPartition(Graph.of(way.graph.nodes, edges), way.layout, way.number)
