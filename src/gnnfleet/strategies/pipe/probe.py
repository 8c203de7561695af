"""What layers and the network take, measured before the work is dealt to stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.reduce import gather_rows, sum_over_ranks
from gnnfleet.comm.wire import receive, send
from gnnfleet.comm.world import World
from gnnfleet.nn.base import Model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.chunk import ChunkView
from gnnfleet.sharded.mirrors import Mirrors
from gnnfleet.sharded.stream import Stream, Turn
from gnnfleet.sharded.way import Chunk, Way
from gnnfleet.strategies.base import products
from gnnfleet.strategies.pipe.plan import LayerCost, Machine

_PROBE = 4 << 20  # bytes of a message that bandwidth is measured with
_TAG = 31


@dataclass(frozen=True)
class Found:
    """A model, layer by layer."""

    layers: tuple[LayerCost, ...]
    parameters: tuple[frozenset[str], ...]  # names of those a layer uses
    crowding: float = 1.0


def probe_layers(
    world: World, model: Model, way: Way, x: Tensor, *, precision: str, cached: bool, number: int = 0
) -> Found:
    """Run every layer on one chunk of a way and on a single row; all ranks call it, the first also by itself.

    ``x`` are the features of the way's rows; ``cached`` says whether the first layer's aggregate will be kept.
    """
    aside = replace(world, traffic=Traffic())
    probe = _Probe(model, way, x, precision, cached)
    # Batch norm needs all rows, and more than one.
    chunk = way.whole if model.batch_norm else way.chunks[number % len(way.chunks)]
    none = way.cut(chunk.low, chunk.high if model.batch_norm else min(chunk.low + 1, chunk.high), -2)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for piece in (none, chunk):
        probe.run(piece)  # what is made once for all epochs is made now
    alone = sum(probe.run(chunk).seconds) if world.is_first else 0.0
    sum_over_ranks(aside, torch.zeros(1))  # the others wait
    there, least = probe.run(chunk), [0.0] * model.num_layers if model.batch_norm else probe.run(none).seconds
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])
    edges = sum(kind.count for kind in way.graph.edges.values())
    inside = sum(int(way.ends(kind, "in").indptr[[chunk.low, chunk.high]].diff()) for kind in way.graph.edges)
    share = (inside + chunk.rows) / max(edges + len(way.layout.order), 1)
    own = [[low, max(t - low, 0.0) / max(share, 1e-9)] for low, t in zip(least, there.seconds, strict=True)]
    every = torch.stack(gather_rows(aside, torch.tensor(own, dtype=torch.float64)[None].flatten(0, 1)))
    low, whole = (column.tolist() for column in every.mean(0).T)
    crowd = sum_over_ranks(aside, torch.tensor([sum(there.seconds) if world.is_first else 0.0, alone]))
    costs = tuple(
        LayerCost(low[i], whole[i], there.made[i], there.forward[i], there.by_source[i], there.home[i])
        for i in range(model.num_layers)
    )
    return Found(costs, tuple(there.parameters), max(1.0, float(crowd[0] / crowd[1].clamp(min=1e-9))))


@dataclass
class _Seen:
    seconds: list[float]
    made: list[int]
    forward: list[int]
    by_source: list[int]
    home: list[int]
    parameters: list[frozenset[str]]


class _Probe:
    def __init__(self, model: Model, way: Way, x: Tensor, precision: str, cached: bool) -> None:
        self.model, self.way, self.x, self.precision, self.cached = model, way, x, precision, cached
        self.mirrors = Mirrors(World(), way)
        self._views: dict[int, ChunkView] = {}

    def run(self, chunk: Chunk) -> _Seen:
        """One forward and backward of every layer on random neighbours; gradients are thrown away."""
        seen = _Seen([], [], [], [], [], [])
        opened = self._views.setdefault(chunk.number, ChunkView.open(chunk, Stream(self.way, self.mirrors)))
        self.model.train()
        rows: Any = self.x[chunk.span]
        carry: Tensor | None = None
        slots = torch.zeros(len(self.way.layout.order), dtype=torch.int64)
        for index in range(self.model.num_layers):
            stream = Stream(self.way, self.mirrors)
            view = opened.during(Turn(0, (-1,)), stream).at(key=DrawKey())
            given = [t.detach().requires_grad_(index > 0) for t in (rows, carry) if t is not None]
            self.model.zero_grad(set_to_none=True)
            near = self.model.precompute(view, given[0]) if index == 0 and self.cached else None
            stream.begin(slots)
            stream.history.clear()
            started = time.perf_counter()
            with products(self.precision):
                out = self.model.layer(index, view, given[0], given[1] if len(given) > 1 else None, aggregated=near)
            made = [t for t in out if isinstance(t, Tensor)]
            ends = [t for t in made if t.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            seen.seconds.append(time.perf_counter() - started)
            seen.made.append(sum(_row(t) for t in made))
            forward, by_source, home = stream.widths()
            seen.forward.append(forward)
            seen.by_source.append(by_source)
            seen.home.append(home)
            used = [name for name, weight in self.model.named_parameters() if weight.grad is not None]
            seen.parameters.append(frozenset(used))
            rows, carry = made[0], made[1] if len(made) > 1 else None
        self.model.zero_grad(set_to_none=True)
        return seen


def _row(table: Tensor) -> int:
    return int(table.shape[1]) * table.element_size()


def probe_network(world: World, crowding: float) -> Machine:
    """Bandwidth and latency with all ranks sending to their neighbours at once."""
    if world.size == 1:
        return Machine(float("inf"), 0.0)
    aside = replace(world, traffic=Traffic())
    latency = statistics.median(_pass(aside, 1) for _ in range(9))
    seconds = statistics.median(_pass(aside, _PROBE) for _ in range(3))
    own = torch.tensor([latency, max(seconds - latency, 1e-9)], dtype=torch.float64)
    latency, seconds = (sum_over_ranks(aside, own) / world.size).tolist()
    return Machine(_PROBE / seconds, latency, crowding, world.size)


def _pass(world: World, size: int) -> float:
    """Seconds until a message to the next rank is sent and one from the rank before is there."""
    here, there = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    started = time.perf_counter()
    coming = receive(world, there, (world.rank - 1) % world.size, tag=_TAG, doing="bandwidth")
    going = send(world, here, (world.rank + 1) % world.size, tag=_TAG, doing="bandwidth")
    coming.wait()
    going.wait()
    return time.perf_counter() - started


def owners(parameters: Sequence[frozenset[str]], split: Sequence[range], names: Sequence[str]) -> dict[str, list[int]]:
    """{name of a parameter: the stages whose layers use it}; what belongs to no layer reads the output: the last's."""
    found = {}
    for name in names:
        stages = [place for place, each in enumerate(split) if any(name in parameters[index] for index in each)]
        found[name] = stages or [len(split) - 1]
    return found
