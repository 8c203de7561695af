"""Ways × stages × chunks: what an epoch would take for every candidate, from measured layers and a measured network.

A layer on a chunk takes some seconds anyway, and some for every row and every edge. Stages work side by side: n chunks
of a way need n + S − 1 slots, each as long as the dearest stage or the transfer beside it, and where workers share
processors no shorter than these need for all that is at work. Between the ways of a stage the rows that another way
mirrors travel in every layer, forward and back. N rows, S stages, W ways, C chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnnfleet.strategies.pipe.schedule import split_layers
from gnnfleet.units import show_size


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes, forward and backward, of a worker with processors to itself; bytes are as they travel."""

    least: float  # seconds of any chunk
    row: float  # seconds of a row of it
    edge: float  # seconds of an edge to it
    made: int  # bytes of a row it hands on, what it carries past layers included
    forward: int  # bytes of a source row that other ways mirror
    by_source: int  # bytes of a destination row that they mirror for backward
    home: int  # bytes of a row that goes home to its source

    def seconds(self, rows: float, edges: float) -> float:
        return self.least + self.row * rows + self.edge * edges

    @property
    def trips(self) -> int:
        """How often the ways of a stage wait for each other's rows."""
        return bool(self.forward) + bool(self.by_source) + bool(self.home)


@dataclass(frozen=True)
class Work:
    """What a model takes."""

    layers: tuple[LayerCost, ...]
    once: float = 0.0  # seconds of a row of the way, once in a pass: tables of all layers that every pass makes anew
    step: float = 0.0  # seconds of the optimizer


@dataclass(frozen=True)
class Weights:
    """Parameters by name: which layers use them, and the bytes that a worker hands to the sum of their gradients."""

    layers: tuple[frozenset[str], ...]
    sizes: Mapping[str, int]

    def owners(self, split: Sequence[range]) -> dict[str, list[int]]:
        """{name: the stages whose layers use it}; what belongs to no layer reads the output: the last's."""
        found = {}
        for name in self.sizes:
            stages = [place for place, each in enumerate(split) if any(name in self.layers[index] for index in each)]
            found[name] = stages or [len(split) - 1]
        return found

    def summed(self, candidate: Candidate, split: Sequence[range]) -> int:
        """Bytes of all sums: among the ways of a stage, and of what several stages use among all of these."""
        owners = self.owners(split)
        inside = sum(len(stages) * self.sizes[name] for name, stages in owners.items()) if candidate.ways > 1 else 0
        tied = sum(self.sizes[name] for name, stages in owners.items() if len(stages) > 1)
        return candidate.ways * inside + candidate.workers * tied


@dataclass(frozen=True)
class Machine:
    """What was measured of the workers together."""

    bandwidth: float  # bytes per second that a worker sends, all of them at once
    latency: float  # seconds of a message
    crowding: float = 1.0  # how many times as long a layer takes while all workers compute
    workers: int = 1
    meeting: float = 0.0  # seconds that all workers lose by waiting for each other once, bytes apart

    def slowed(self, active: int) -> float:
        """How many times as long work takes that so many workers have at once: workers / crowding of them get on as if
        alone, more share what these have."""
        return 1.0 if active == 1 else max(1.0, self.crowding * active / self.workers)


@dataclass(frozen=True)
class Candidate:
    """A grid; ``copies`` are the rows that other ways mirror, (sources, destinations)."""

    ways: int
    stages: int
    chunks: int
    copies: tuple[int, int] = (0, 0)

    @property
    def slots(self) -> int:
        return self.chunks // self.ways

    @property
    def workers(self) -> int:
        return self.ways * self.stages

    @property
    def is_exact(self) -> bool:
        return self.slots == 1

    def __str__(self) -> str:
        if self.workers == 1:
            return "one worker"
        if self.stages == 1:
            return f"graph parallel, {self.ways} ways"
        kind = "pipeline" if self.ways == 1 else f"hybrid, {self.ways} ways ×"
        return f"{kind} {self.stages} stages, {self.chunks} chunks"


@dataclass(frozen=True)
class Forecast:
    """An epoch of a candidate."""

    candidate: Candidate
    layers: tuple[range, ...]
    seconds: float
    bytes: int

    def __str__(self) -> str:
        exact = "exact" if self.candidate.is_exact else "with history"
        return f"{self.candidate} ({exact}): {self.seconds:.3g} s, {show_size(self.bytes)} sent per epoch"


def volume(layers: Sequence[LayerCost], split: Sequence[range], candidate: Candidate, rows: int) -> int:
    """Bytes that all workers send in the steps of an epoch, the sums of gradients apart."""
    ends = sum(2 * rows * layers[each[-1]].made for each in split[:-1])
    return ends + sum(_mirrored(layer, candidate) for layer in layers)


def _mirrored(layer: LayerCost, candidate: Candidate) -> int:
    """Bytes of a layer between the ways of its stage."""
    inward, outward = candidate.copies
    return inward * (layer.forward + layer.home) + outward * layer.by_source


def forecast(
    work: Work, candidate: Candidate, machine: Machine, *, loads: Sequence[tuple[int, int]], weights: Weights
) -> Forecast:
    """An epoch of a model on chunks of so many (rows, edges), those of a way next to each other."""
    layers, chunks = work.layers, candidate.chunks
    rows, edges = sum(each for each, _ in loads), sum(each for _, each in loads)
    costs = [layer.seconds(rows / chunks, edges / chunks) for layer in layers]
    split = split_layers(costs, candidate.stages)
    dearest = max(sum(costs[index] for index in each) for each in split) * _uneven(layers, candidate, loads)
    # Ways wait for each other's rows in every layer, forward and back: that takes turns with computing, while the rows
    # of a chunk pass from stage to stage beside it.
    apart = max(_apart(layers, each, candidate, machine) for each in split)
    hop = 0.0
    for each in split[:-1]:
        sent = 2 * rows / chunks * layers[each[-1]].made
        hop = max(hop, sent / machine.bandwidth + 2 * machine.latency)
    seconds = 0.0
    for slot in range(candidate.slots + candidate.stages - 1):
        active = min(slot + 1, candidate.stages, candidate.slots + candidate.stages - 1 - slot)
        shared = sum(costs) / candidate.stages * machine.slowed(active * candidate.ways)
        seconds += max(max(dearest, shared) + apart, hop)
    # The first chunk that comes back waits for the tables of one stage after the other.
    held = (rows + max(candidate.copies)) / candidate.ways
    seconds += held * work.once * machine.slowed(candidate.ways)
    seconds += work.step * max(map(len, split)) / len(layers) * machine.slowed(candidate.workers)
    summed = weights.summed(candidate, split)
    if candidate.ways > 1:
        seconds += 2 * summed / candidate.workers / machine.bandwidth + machine.latency
    return Forecast(candidate, tuple(split), seconds, volume(layers, split, candidate, rows) + summed)


def _uneven(layers: Sequence[LayerCost], candidate: Candidate, loads: Sequence[tuple[int, int]]) -> float:
    """What chunks that are not alike cost, for chunks that are. Of those that ways work on at once the dearest counts
    (they come in random order; here the dearest with the dearest), and stages fill and drain at the pace of the dearest
    of all."""
    costs = [sum(layer.seconds(*load) for layer in layers) for load in loads]
    ways = [sorted(costs[way * candidate.slots : (way + 1) * candidate.slots]) for way in range(candidate.ways)]
    slots = [max(at_once) for at_once in zip(*ways, strict=True)]
    mean, more = sum(costs) / len(costs), candidate.stages - 1
    return (sum(slots) + more * max(slots)) / (len(slots) + more) / mean if mean > 0 else 1.0


def _apart(layers: Sequence[LayerCost], stage: range, candidate: Candidate, machine: Machine) -> float:
    """Seconds in which the ways of a stage exchange rows of a chunk each."""
    if candidate.ways == 1:
        return 0.0
    sent = sum(_mirrored(layers[index], candidate) for index in stage)
    met = machine.meeting * (candidate.ways - 1) / max(machine.workers - 1, 1)
    return sent / candidate.chunks / machine.bandwidth + sum(layers[index].trips for index in stage) * met


def choose(forecasts: Sequence[Forecast]) -> tuple[Forecast, list[str]]:
    """(the fastest, of equals the one that sends least; why, in words)."""
    best = min(forecasts, key=lambda each: (each.seconds, each.bytes))
    ordered = sorted(forecasts, key=lambda each: each.seconds)
    lines = [f"plan: {best}"]
    lines += [f"  rather than {each}" for each in ordered if each is not best]
    return best, lines
