"""What layers and the network take, measured before the work is dealt to stages.

The first worker tries layers by itself: on a piece of its way and on one row of it, and on the same rows without edges.
Then all workers walk layers at the same time, each on a piece: at first freely, then waiting for each other after every
forward and backward as ways do. What a run makes once, and what a pass makes once, is there before clocks start.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.code import Code
from gnnfleet.comm.reduce import gather_rows, share, sum_over_ranks
from gnnfleet.comm.wire import receive, send
from gnnfleet.comm.world import World
from gnnfleet.graph.chunks import Layout
from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.rows import gather
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.chunk import ChunkView
from gnnfleet.sharded.mirrors import Mirrors
from gnnfleet.sharded.stream import Stream, Turn
from gnnfleet.sharded.way import Chunk, Way
from gnnfleet.strategies.base import Job, TrainConfig, make_optimizer, products
from gnnfleet.strategies.inputs import wants_aggregate
from gnnfleet.strategies.pace import PIECE_EDGES, PIECE_ROWS
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.cores import Cores, using
from gnnfleet.strategies.pipe.plan import Candidate, LayerCost, Machine, Weights, Work
from gnnfleet.strategies.pipe.station import features_of

_PROBE = 4 << 20  # bytes of a message that bandwidth is measured with
_WIDTH = 64  # numbers of its rows
_TAG = 31
_REPEATS = 3


@dataclass(frozen=True)
class Trial:
    """What layers are tried on: a way, and how they will be computed."""

    way: Way
    features: Callable[[slice], Tensor]  # of some of its rows: no more are read than are needed
    precision: str
    cached: bool  # whether the first layer's aggregate will be kept
    code: Code  # how rows travel
    train: TrainConfig


@dataclass(frozen=True)
class Found:
    """A model, layer by layer, and the workers together."""

    work: Work
    single: Work  # of one worker for all of the graph, if that was tried
    weights: Weights
    machine: Machine

    def of(self, candidate: Candidate) -> Work:
        return self.single if candidate.workers == candidate.chunks == 1 else self.work

    def as_json(self) -> dict[str, Any]:
        used = [sorted(names) for names in self.weights.layers]
        return {
            "work": asdict(self.work),
            "single": asdict(self.single),
            "weights": {"layers": used, "sizes": dict(self.weights.sizes)},
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Found:
        weights = told["weights"]
        work, single = (
            Work(**{**told[name], "layers": tuple(LayerCost(**layer) for layer in told[name]["layers"])})
            for name in ("work", "single")
        )
        return cls(
            work,
            single,
            Weights(tuple(map(frozenset, weights["layers"])), weights["sizes"]),
            Machine(**told["machine"]),
        )


def loads_of(graph: Graph, layout: Layout) -> list[tuple[int, int]]:
    """(rows, edges to them) of every chunk."""
    degree = torch.zeros(len(layout.order), dtype=torch.int64)
    for edges in graph.edges.values():
        degree += edges.in_degree()
    before = torch.cat([degree[:1].new_zeros(1), degree[layout.order].cumsum(0)])
    rows, edges_to = layout.starts.diff().tolist(), before[layout.starts].diff().tolist()
    return list(zip(rows, edges_to, strict=True))


def try_layers(
    config: PipeConfig, job: Job, layout: Layout, *, cores: Cores | None = None, single: bool = False
) -> Found:
    """The layers of a model on chunks of a layout; all ranks of the job call it. ``single``: one worker for all of the
    graph is tried as well."""
    number, which = divmod(job.world.rank, layout.ways)
    way = Way(job.graph, layout, which)
    cached = wants_aggregate(config.cache_inputs, hides=job.task.hides)
    trial = Trial(way, partial(features_of, job, way), job.precision, cached, Code(config.wire), job.train)
    cores = cores or Cores.find(replace(job.world, traffic=Traffic()))
    return probe(job.world, job.model, trial, cores, number=number, single=single)


def probe(world: World, model: Model, trial: Trial, cores: Cores, *, number: int = 0, single: bool = False) -> Found:
    """Try every layer; all ranks call it, ``number`` is the stage they would have. All find what the first does."""
    aside = replace(world, traffic=Traffic())
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    way = trial.way
    # Batch norm needs all rows, and more than one.
    chunk = way.whole if model.batch_norm else _piece_of(way, _some_chunk(way, number))
    tried = Tried(model, trial, chunk)
    sizes = {name: weight.nbytes + weight.element_size() for name, weight in model.named_parameters()}
    weights, machine = Weights(tuple(tried.parameters), sizes), Machine(float("inf"), 0.0)
    _wait_for_all(aside)
    found = Found(*_alone(tried, cores, single=single), weights, machine) if world.is_first else None
    heard = _from_first(aside, found)  # until then the others wait
    if world.size > 1:
        foreseen = [layer.seconds(chunk.rows, edges_of(chunk)) for layer in heard.work.layers]
        machine = _all_at_once(aside, tried, foreseen, cores, number)
        heard = _from_first(aside, replace(heard, machine=machine) if world.is_first else None)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    model.zero_grad(set_to_none=True)
    return heard


def _from_first(aside: World, found: Found | None) -> Found:
    """What the first rank has found: clocks differ, and all have to plan the same."""
    return Found.from_json(json.loads(share(aside, None if found is None else json.dumps(found.as_json()).encode())))


def _wait_for_all(aside: World) -> None:
    sum_over_ranks(aside, torch.zeros(1))


# -- pieces --


def _some_chunk(way: Way, number: int) -> Chunk:
    """One with rows, if there is one."""
    chunk = way.chunks[number % len(way.chunks)]
    return chunk if chunk.rows else max(way.chunks, key=lambda each: each.rows)


def _piece_of(way: Way, chunk: Chunk) -> Chunk:
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


def _without_edges(way: Way) -> Way:
    edges = {}
    for kind, each in way.graph.edges.items():
        weight, attr = (None if values is None else values[:0] for values in (each.weight, each.attr))
        edges[kind] = Edges(indptr=torch.zeros_like(each.indptr), src=each.src[:0], weight=weight, attr=attr)
    return Way(Graph.of(way.graph.nodes, edges), way.layout, way.number)


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


# -- one worker by itself --

Fit = tuple[float, float, float]
"""Seconds of a layer for (any chunk, a row of it, an edge to it)."""


def seconds_of(tried: Tried) -> list[float]:
    """Of every layer on a chunk, all tables being there: dealt to layers by processor time, since whoever is held up is
    held up anywhere."""
    seconds, busy = [], []
    for index in range(tried.model.num_layers):
        layer = Layer(tried, index)
        walls, processors = zip(*(_timed(layer.run) for _ in range(_REPEATS)), strict=True)
        seconds.append(statistics.median(walls))
        busy.append(statistics.median(processors))
    scale = sum(seconds) / max(sum(busy), 1e-9)
    return [each * scale for each in busy]


def once_of(tried: Tried, seconds: Sequence[float]) -> float:
    """What the first chunk of a pass takes besides, in all layers: for each row of the way."""
    first = 0.0
    for index in range(tried.model.num_layers):
        layer, found = Layer(tried, index), []
        for _ in range(_REPEATS):
            layer.begin()
            found.append(_timed(layer.run)[0])
        first += statistics.median(found)
    return max(0.0, first - sum(seconds)) / max(1, tried.chunk.way.rows)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds (by the clock, of processor time)."""
    started, busy = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - started, time.thread_time() - busy


def _alone(tried: Tried, cores: Cores, *, single: bool) -> tuple[Work, Work]:
    """What layers take of this worker while the others wait: (as one of several, as a ``single`` one). That keeps no
    tables and reads no other chunk, which is a matter of rows, and has the threads of all."""
    model, trial, chunk = tried.model, tried.trial, tried.chunk
    few = chunk.way.cut(chunk.low, chunk.low + (0 if model.batch_norm else min(1, chunk.rows)), -2)
    bare, rows, edges = _without_edges(chunk.way), (chunk.rows, few.rows), (edges_of(chunk), edges_of(few))

    def on_row(way: Way, *, remembers: bool = True) -> list[float]:
        piece = way.cut(few.low, few.high, -2)
        return seconds_of(Tried(model, trial, piece, remembers=remembers)) if few.rows else [0.0] * model.num_layers

    def without_edges(*, remembers: bool) -> tuple[list[float], list[float], float]:
        plain = Tried(model, trial, bare.cut(chunk.low, chunk.high, -2), remembers=remembers)
        much = seconds_of(plain)
        return much, on_row(bare, remembers=remembers), once_of(plain, much)

    def work(fits: Sequence[Fit], once: float) -> Work:
        layers = [LayerCost(*fit, *sent) for fit, sent in zip(fits, tried.bytes, strict=True)]
        return Work(tuple(layers), once, _step(model, trial.train))

    *without, once = without_edges(remembers=True)
    whole = seconds_of(tried)
    fits = fit_layers(rows, edges, without, (whole, on_row(chunk.way)))
    of_several = work(fits, once)
    if not single:
        return of_several, of_several
    *without, once = without_edges(remembers=False)
    by_rows = fit_layers(rows, (0, 0), without, without)
    with using(cores.free):  # compared on the same piece
        gain = sum(seconds_of(tried)) / max(sum(whole), 1e-9) if cores.free != cores.threads else 1.0
        both = zip(by_rows, fits, strict=True)
        return of_several, work(
            [(gain * low, gain * row, gain * edge) for (low, row, _), (_, _, edge) in both], gain * once
        )


def fit_layers(
    rows: tuple[int, int],
    edges: tuple[int, int],
    without: Sequence[Sequence[float]],
    with_edges: Sequence[Sequence[float]],
) -> list[Fit]:
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
    return statistics.median(_timed(optimizer.step)[0] for _ in range(_REPEATS))


# -- all workers together --


def _all_at_once(aside: World, tried: Tried, foreseen: Sequence[float], cores: Cores, number: int) -> Machine:
    """Each walks as many layers as a stage has, as often as there are stages; by itself it would take what is
    ``foreseen`` for each."""
    count, ways = len(foreseen), tried.chunk.way.layout.ways
    stages = max(1, aside.size // ways)
    each = max(1, count // stages)
    first = min(number * count // stages, count - each)
    layers = [Layer(tried, index) for index in range(first, first + each)]

    def walk(then: Callable[[], object] = lambda: None) -> None:
        for _ in range(stages):
            for layer in layers:
                layer.run(then)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(_REPEATS):
            _wait_for_all(aside)
            found.append(_timed(work)[0])
        return statistics.median(found)

    free = seconds(walk)
    locked = seconds(lambda: walk(lambda: _meet(aside))) if ways > 1 else free
    word = statistics.median([_meet(aside) for _ in range(10)][1:])
    alone = stages * sum(foreseen[first : first + each])
    own = torch.tensor([[free / max(alone, 1e-9), cores.crowding, free, locked, word]], dtype=torch.float64)
    every = torch.cat(gather_rows(aside, own)).tolist()
    crowding, meeting = together(every, meetings=2 * stages * each)
    return _network(aside, crowding, meeting)


def together(every: Sequence[Sequence[float]], meetings: int) -> tuple[float, float]:
    """(crowding, seconds of a meeting) from what each rank says: how many times as long it took as by itself, how many
    times it must at least, seconds when all walk freely, when they meet so many times, and of a word to all.

    What meeting costs is what it takes longer than the slowest needs anyway; waiting for others that compute is in
    ``crowding``.
    """
    slowed, least, free, locked, word = (list(column) for column in zip(*every, strict=True))
    crowding = max(statistics.median(slowed), *least)
    return crowding, max(statistics.median(word), (max(locked) - max(free)) / meetings)


def _network(aside: World, crowding: float, meeting: float) -> Machine:
    """Bandwidth and latency with all ranks sending to their neighbours at once."""
    latency = statistics.median(_pass(aside, 1) for _ in range(9))
    seconds = statistics.median(_pass(aside, _PROBE // (4 * _WIDTH)) for _ in range(_REPEATS))
    own = torch.tensor([latency, max(seconds - latency, 1e-9)], dtype=torch.float64)
    latency, seconds = (sum_over_ranks(aside, own) / aside.size).tolist()
    return Machine(_PROBE / seconds, latency, crowding, aside.size, meeting)


def _pass(world: World, rows: int) -> float:
    """Seconds until rows are sent to the next rank and those of the rank before are in their place: picked from a table
    and written to one, as ways do."""
    table, picked = torch.zeros(2 * rows, _WIDTH), torch.arange(0, 2 * rows, 2)

    def work() -> None:
        (came,) = _swap(world, gather(table, picked), [1])
        table[picked].clone()
        table[picked] = came

    return _timed(work)[0]


def _meet(world: World) -> float:
    """Seconds until all other ranks have said a word to this one."""
    word = torch.zeros(1, dtype=torch.uint8)
    return _timed(lambda: _swap(world, word, range(1, world.size)))[0]


def _swap(world: World, here: Tensor, steps: Sequence[int]) -> list[Tensor]:
    """What others send who are so many ranks before this one, while it sends to those after it."""
    rooms = [torch.empty_like(here) for _ in steps]
    posted = [
        receive(world, room, (world.rank - step) % world.size, tag=_TAG, doing="bandwidth")
        for room, step in zip(rooms, steps, strict=True)
    ]
    posted += [send(world, here, (world.rank + step) % world.size, tag=_TAG, doing="bandwidth") for step in steps]
    for message in posted:
        message.wait()
    return rooms
