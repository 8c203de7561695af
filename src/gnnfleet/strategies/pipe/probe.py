"""What layers and the network take, measured before the work is dealt to stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.code import Code
from gnnfleet.comm.reduce import gather_rows, sum_over_ranks
from gnnfleet.comm.wire import receive, send
from gnnfleet.comm.world import World
from gnnfleet.graph.chunks import Layout
from gnnfleet.nn.base import Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.chunk import ChunkView
from gnnfleet.sharded.mirrors import Mirrors
from gnnfleet.sharded.stream import Stream, Turn
from gnnfleet.sharded.way import Chunk, Way
from gnnfleet.strategies.base import Job, products
from gnnfleet.strategies.inputs import wants_aggregate
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.plan import LayerCost, Machine, Weights
from gnnfleet.strategies.pipe.station import features_of

_PROBE = 4 << 20  # bytes of a message that bandwidth is measured with
_TAG = 31
_REPEATS = 2


@dataclass(frozen=True)
class Trial:
    """What layers are tried on: a way, and how they will be computed."""

    way: Way
    features: Callable[[slice], Tensor]  # of some of its rows: no more are read than are needed
    precision: str
    cached: bool  # whether the first layer's aggregate will be kept
    code: Code  # how rows travel


@dataclass(frozen=True)
class Found:
    """A model, layer by layer, and the workers together."""

    layers: tuple[LayerCost, ...]
    weights: Weights
    machine: Machine

    def as_json(self) -> dict[str, Any]:
        used = [sorted(names) for names in self.weights.layers]
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "weights": {"layers": used, "sizes": dict(self.weights.sizes)},
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Found:
        weights = told["weights"]
        return cls(
            tuple(LayerCost(**layer) for layer in told["layers"]),
            Weights(tuple(map(frozenset, weights["layers"])), weights["sizes"]),
            Machine(**told["machine"]),
        )


def try_layers(config: PipeConfig, job: Job, layout: Layout) -> Found:
    """The layers of a model on chunks of a layout; all ranks of the job call it."""
    number, which = divmod(job.world.rank, layout.ways)
    way = Way(job.graph, layout, which)
    cached = wants_aggregate(config.cache_inputs, hides=job.task.hides)
    trial = Trial(way, partial(features_of, job, way), job.precision, cached, Code(config.wire))
    return probe(job.world, job.model, trial, number=number)


def probe(world: World, model: Model, trial: Trial, *, number: int = 0) -> Found:
    """Run every layer on one chunk of a way and on a single row; all ranks call it, the first also by itself."""
    aside = replace(world, traffic=Traffic())
    way, tried = trial.way, _Tried(model, trial)
    # Batch norm needs all rows, and more than one.
    chunk = way.whole if model.batch_norm else _some_chunk(way, number)
    none = way.cut(chunk.low, chunk.high if model.batch_norm else min(chunk.low + 1, chunk.high), -2)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for piece in (none, chunk):
        tried.run(piece)  # what is made once for all epochs is made now
    alone = sum(tried.fastest(chunk).seconds) if world.is_first else 0.0
    sum_over_ranks(aside, torch.zeros(1))  # the others wait
    there = tried.fastest(chunk)
    least = [0.0] * model.num_layers if model.batch_norm else tried.fastest(none).shared
    waited: list[float] = []
    tried.run(chunk, then=lambda: waited.append(_meet(aside)))
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    low, whole = _by_layer(aside, way, chunk, least, there.shared)
    costs = tuple(
        LayerCost(low[i], whole[i], there.made[i], there.forward[i], there.by_source[i], there.home[i])
        for i in range(model.num_layers)
    )
    sizes = {name: weight.nbytes + weight.element_size() for name, weight in model.named_parameters()}
    first = [sum(there.seconds), alone] if world.is_first else [0.0, 0.0]
    crowded, single, meeting = sum_over_ranks(
        aside, torch.tensor([*first, statistics.mean(waited) / world.size])
    ).tolist()
    machine = _network(aside, max(1.0, crowded / max(single, 1e-9)), meeting)
    return Found(costs, Weights(tuple(there.parameters), sizes), machine)


def _some_chunk(way: Way, number: int) -> Chunk:
    """One with rows, if there is one."""
    chunk = way.chunks[number % len(way.chunks)]
    return chunk if chunk.rows else max(way.chunks, key=lambda each: each.rows)


def _by_layer(
    aside: World, way: Way, chunk: Chunk, least: list[float], seconds: list[float]
) -> tuple[list[float], list[float]]:
    """(seconds of each layer for next to nothing, for all edges beyond that), as most ranks have seen it: others may
    have been held up."""
    edges = sum(kind.count for kind in way.graph.edges.values())
    inside = sum(int(way.ends(kind, "in").indptr[[chunk.low, chunk.high]].diff()) for kind in way.graph.edges)
    share = (inside + chunk.rows) / max(edges + len(way.layout.order), 1)
    own = [
        [low, max(t - low, 0.0) / share] if share else [float("nan")] * 2 for low, t in zip(least, seconds, strict=True)
    ]
    every = torch.stack(gather_rows(aside, torch.tensor(own, dtype=torch.float64)))
    low, whole = every.nanmedian(0).values.nan_to_num().T.tolist()
    return low, whole


@dataclass
class _Seen:
    seconds: list[float]
    busy: list[float]  # of these, of processor time
    made: list[int]
    forward: list[int]
    by_source: list[int]
    home: list[int]
    parameters: list[frozenset[str]]

    @property
    def shared(self) -> list[float]:
        """The seconds of all layers, dealt to them by processor time: whoever is held up is held up anywhere."""
        scale = sum(self.seconds) / max(sum(self.busy), 1e-9)
        return [busy * scale for busy in self.busy]


class _Tried:
    def __init__(self, model: Model, trial: Trial) -> None:
        self.model, self.trial = model, trial
        self.mirrors = Mirrors(World(), trial.way, trial.code)
        self._views: dict[int, ChunkView] = {}

    def fastest(self, chunk: Chunk) -> _Seen:
        """Of several times."""
        return min((self.run(chunk) for _ in range(_REPEATS)), key=lambda seen: sum(seen.seconds))

    def run(self, chunk: Chunk, *, then: Callable[[], None] | None = None) -> _Seen:
        """One forward and backward of every layer on random neighbours, ``then`` after each; gradients are thrown
        away."""
        seen, way = _Seen([], [], [], [], [], [], []), self.trial.way
        opened = self._views.setdefault(chunk.number, ChunkView.open(chunk, Stream(way, self.mirrors)))
        self.model.train()
        rows: Any = self.trial.features(chunk.span)
        carry: Tensor | None = None
        slots = torch.zeros(len(way.layout.order), dtype=torch.int64)
        for index in range(self.model.num_layers):
            stream = Stream(way, self.mirrors)
            view = opened.during(Turn(0, (-1,)), stream).at(key=DrawKey())
            given = [t.detach().requires_grad_(index > 0) for t in (rows, carry) if t is not None]
            self.model.zero_grad(set_to_none=True)
            near = self.model.precompute(view, given[0]) if index == 0 and self.trial.cached else None
            stream.begin(slots)
            stream.history.clear()
            started, busy = time.perf_counter(), time.thread_time()
            with products(self.trial.precision):
                out = self.model.layer(index, view, given[0], given[1] if len(given) > 1 else None, aggregated=near)
            made = [t for t in out if isinstance(t, Tensor)]
            ends = [t for t in made if t.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            seen.busy.append(time.thread_time() - busy)
            seen.seconds.append(time.perf_counter() - started)
            seen.made.append(sum(self.trial.code.row_bytes(t) for t in made))
            forward, by_source, home = stream.widths()
            seen.forward.append(forward)
            seen.by_source.append(by_source)
            seen.home.append(home)
            used = [name for name, weight in self.model.named_parameters() if weight.grad is not None]
            seen.parameters.append(frozenset(used))
            rows, carry = made[0], made[1] if len(made) > 1 else None
            if then is not None:
                then()
        self.model.zero_grad(set_to_none=True)
        return seen


def _network(aside: World, crowding: float, meeting: float) -> Machine:
    """Bandwidth and latency with all ranks sending to their neighbours at once."""
    if aside.size == 1:
        return Machine(float("inf"), 0.0)
    latency = statistics.median(_pass(aside, 1) for _ in range(9))
    seconds = statistics.median(_pass(aside, _PROBE) for _ in range(3))
    own = torch.tensor([latency, max(seconds - latency, 1e-9)], dtype=torch.float64)
    latency, seconds = (sum_over_ranks(aside, own) / aside.size).tolist()
    return Machine(_PROBE / seconds, latency, crowding, aside.size, meeting)


def _pass(world: World, size: int) -> float:
    """Seconds until a message to the next rank is sent and one from the rank before is there."""
    return _swap(world, size, [1])


def _meet(world: World) -> float:
    """Seconds until all other ranks have said a word to this one."""
    return _swap(world, 1, range(1, world.size))


def _swap(world: World, size: int, steps: Sequence[int]) -> float:
    here, there = torch.zeros(size, dtype=torch.uint8), torch.empty(len(steps), size, dtype=torch.uint8)
    started = time.perf_counter()
    posted = [
        receive(world, room, (world.rank - step) % world.size, tag=_TAG, doing="bandwidth")
        for room, step in zip(there, steps, strict=True)
    ]
    posted += [send(world, here, (world.rank + step) % world.size, tag=_TAG, doing="bandwidth") for step in steps]
    for message in posted:
        message.wait()
    return time.perf_counter() - started
