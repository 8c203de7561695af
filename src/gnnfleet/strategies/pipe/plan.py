"""Ways × stages × chunks: what an epoch would take for every candidate, from measured layers and a measured network.

A layer on a share f of the edges takes a + f·b seconds (a: what it takes on next to nothing). Stages work side by side:
n chunks of a way need n + S − 1 slots, each as long as the dearest stage or the transfer beside it. Between the ways of
a stage the rows that another way mirrors travel in every layer, forward and back. N rows, S stages, W ways, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnfleet.report.sizes import show_size
from gnnfleet.strategies.pipe.schedule import split_layers


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes, measured on a piece of the graph while all workers compute."""

    least: float  # seconds for next to no rows
    whole: float  # seconds for all edges, beyond that
    made: int  # bytes of a row it hands on, what it carries past layers included
    forward: int  # bytes of a source row that other ways mirror
    by_source: int  # bytes of a destination row that they mirror for backward
    home: int  # bytes of a row that goes home to its source

    def seconds(self, share: float) -> float:
        return self.least + share * self.whole


@dataclass(frozen=True)
class Machine:
    """What was measured of the workers together."""

    bandwidth: float  # bytes per second that a worker sends, all of them at once
    latency: float  # seconds of a message
    crowding: float = 1.0  # how much longer a layer takes while all workers compute
    workers: int = 1

    def slowed(self, active: int) -> float:
        """How long a layer takes while so many workers compute, for its time while all do."""
        return (1.0 + (self.crowding - 1.0) * (active - 1) / max(self.workers - 1, 1)) / self.crowding


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


def volume(
    layers: Sequence[LayerCost], split: Sequence[range], candidate: Candidate, rows: int, *, wire: int = 1
) -> int:
    """Bytes that all workers send in the steps of an epoch, the sums of gradients between ways apart; ``wire`` divides
    the size of numbers."""
    ends = sum(2 * rows * layers[each[-1]].made for each in split[:-1])
    inward, outward = candidate.copies
    mirrors = sum(inward * (layer.forward + layer.home) + outward * layer.by_source for layer in layers)
    return (ends + mirrors) // wire


def forecast(
    layers: Sequence[LayerCost], candidate: Candidate, machine: Machine, *, rows: int, weights: int, wire: int = 1
) -> Forecast:
    """An epoch of a model of ``weights`` bytes on a graph of ``rows`` nodes."""
    slowed = machine.slowed(candidate.workers)
    costs = [slowed * layer.seconds(1 / candidate.chunks) for layer in layers]
    split = split_layers(costs, candidate.stages)
    slot = 0.0
    for each in split:
        work = sum(costs[index] for index in each)
        if candidate.ways > 1:  # the ways of a stage wait for each other's rows in every layer
            inward, outward = candidate.copies
            sent = sum(
                inward * (layers[index].forward + layers[index].home) + outward * layers[index].by_source
                for index in each
            )
            # Packing and waiting take turns with computing: where workers share processors they slow each other down.
            hops = 2 * len(each) * (candidate.ways - 1) * machine.latency
            work += machine.crowding * (sent / wire / candidate.chunks / machine.bandwidth + hops)
        slot = max(slot, work)
    for each in split[:-1]:
        hop = 2 * rows / candidate.chunks * layers[each[-1]].made / wire
        slot = max(slot, hop / machine.bandwidth + 2 * machine.latency)
    seconds = (candidate.slots + candidate.stages - 1) * slot
    if candidate.ways > 1:
        seconds += 2 * weights / candidate.stages / machine.bandwidth + machine.latency
    return Forecast(candidate, tuple(split), seconds, volume(layers, split, candidate, rows, wire=wire))


def choose(forecasts: Sequence[Forecast]) -> tuple[Forecast, list[str]]:
    """(the fastest, of equals the one that sends least; why, in words)."""
    best = min(forecasts, key=lambda each: (each.seconds, each.bytes))
    ordered = sorted(forecasts, key=lambda each: each.seconds)
    lines = [f"plan: {best}"]
    lines += [f"  rather than {each}" for each in ordered if each is not best]
    return best, lines
