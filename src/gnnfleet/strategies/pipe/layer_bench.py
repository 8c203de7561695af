"""Layers that are run time and again on a piece of a way, so that a clock can be held to them.

What a run makes once, and what a pass makes once, is there before clocks start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.comm.compression import Code
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.pipeline.chunk_view import ChunkView
from gnnfleet.sharded.pipeline.chunked_partition import Chunk, Way
from gnnfleet.sharded.pipeline.history import Stream, Turn
from gnnfleet.sharded.pipeline.stage_halo import Mirrors
from gnnfleet.strategies.job import products
from gnnfleet.strategies.step_costs import PIECE_EDGES, PIECE_ROWS
from gnnfleet.tasks.train_options import TrainConfig

REPEATS = 3
"""Of everything that is timed; the median counts."""


@dataclass(frozen=True)
class Trial:
    """What layers are tried on: a way, and how they will be computed."""

    way: Way
    features: Callable[[slice], Tensor]  # of some of its rows: no more are read than are needed
    precision: str
    cached: bool  # whether the first layer's aggregate will be kept
    code: Code  # how rows travel
    train: TrainConfig


class Tried:
    """The layers of a model on a chunk, neighbours elsewhere being rows of zeros; each has been run once. ``remembers``
    as of ``Stream``."""

    def __init__(self, model: Model, trial: Trial, chunk: Chunk, *, remembers: bool = True) -> None:
        self.model, self.trial, self.chunk, self.remembers = model, trial, chunk, remembers
        self.mirrors = Mirrors(World(), chunk.way, trial.code)
        self.view = ChunkView.open(chunk, Stream(chunk.way, self.mirrors))
        self.given: list[list[Tensor]] = [[trial.features(chunk.span)]]  # what each layer reads
        self.near: Aggregate | None = None
        self.parameters: list[frozenset[str]] = []
        self.bytes: list[tuple[int, int, int, int]] = []  # (made, forward, by_source, home) as of ``LayerCost``
        model.train()
        if trial.cached:
            self.view.stream.begin(self.slots)
            self.near = model.precompute(self.view.at(key=DrawKey()), self.given[0][0])
            self.view.stream.history.clear()
        for index in range(model.num_layers):
            model.zero_grad(set_to_none=True)
            layer = Layer(self, index)
            self.given.append([tensor.detach() for tensor in layer.made])
            names = [name for name, weight in model.named_parameters() if weight.grad is not None]
            self.parameters.append(frozenset(names))
            self.bytes.append((sum(map(trial.code.row_bytes, layer.made)), *layer.stream.widths()))

    @property
    def slots(self) -> Tensor:
        return torch.zeros(len(self.chunk.way.layout.order), dtype=torch.int64)


class Layer:
    """A layer that is run time and again, a chunk after the other of a pass; its tables are there after the first."""

    def __init__(self, tried: Tried, index: int) -> None:
        self._tried, self._index = tried, index
        self.stream = Stream(tried.chunk.way, tried.mirrors, remembers=tried.remembers)
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
        view = tried.view.during(Turn(self._slot, (-1,)), self.stream).at(key=DrawKey())
        given = [tensor.detach().requires_grad_(index > 0) for tensor in tried.given[index]]
        near = tried.near if index == 0 else None
        with products(tried.trial.precision):
            out = tried.model.layer(index, view, given[0], given[1] if len(given) > 1 else None, aggregated=near)
        self.made = [tensor for tensor in out if isinstance(tensor, Tensor)]
        then()
        ends = [tensor for tensor in self.made if tensor.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
        self.stream.leave(self._slot)
        then()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds (by the clock, of processor time)."""
    started, busy = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - started, time.thread_time() - busy


# -- pieces --


def some_chunk(way: Way, number: int) -> Chunk:
    """One with rows, if there is one."""
    chunk = way.chunks[number % len(way.chunks)]
    return chunk if chunk.rows else max(way.chunks, key=lambda each: each.rows)


def piece_of(way: Way, chunk: Chunk) -> Chunk:
    """No more of a chunk than tells what all of it takes."""
    ends = _edges_before(way)[chunk.low : chunk.high + 1]
    rows = int(torch.searchsorted(ends, ends[0] + PIECE_EDGES, right=True)) - 1
    rows = max(1, min(rows, PIECE_ROWS))
    return chunk if rows >= chunk.rows else way.cut(chunk.low, chunk.low + rows, -3)


def _edges_before(way: Way) -> Tensor:
    """[n + 1] in-edges of all rows before each."""
    found = torch.zeros(way.rows + 1, dtype=torch.int64)
    for kind in way.graph.edges:
        found += way.ends(kind, "in").indptr
    return found


def edges_of(chunk: Chunk) -> int:
    """In-edges of its rows."""
    return int(_edges_before(chunk.way)[[chunk.low, chunk.high]].diff())


def without_edges(way: Way) -> Way:
    edges = {}
    for kind, each in way.graph.edges.items():
        weight, attr = (None if values is None else values[:0] for values in (each.weight, each.attr))
        edges[kind] = Edges(indptr=torch.zeros_like(each.indptr), src=each.src[:0], weight=weight, attr=attr)
    return Way(Graph.of(way.graph.nodes, edges), way.layout, way.number)
