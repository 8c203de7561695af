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
from gnnfleet.units import format_size


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes, forward and backward, of a worker with processors to itself; bytes are as they travel."""

    base: float  # seconds of any chunk
    per_row: float  # seconds of a row of it
    per_edge: float  # seconds of an edge to it
    output_bytes: int  # bytes of a row it hands on, what it carries past layers included
    forward_bytes: int  # bytes of a source row that other ways mirror
    by_source_bytes: int  # bytes of a destination row that they mirror for backward
    return_bytes: int  # bytes of a row that goes home to its source

    def seconds(self, rows: float, edges: float) -> float:
        return self.base + self.per_row * rows + self.per_edge * edges

    @property
    def exchanges(self) -> int:
        """How often the ways of a stage wait for each other's rows."""
        return bool(self.forward_bytes) + bool(self.by_source_bytes) + bool(self.return_bytes)


@dataclass(frozen=True)
class ModelCost:
    """What a model takes."""

    layers: tuple[LayerCost, ...]
    per_pass: float = (
        0.0  # seconds of a row of the way, once in a pass: tables of all layers that every pass makes anew
    )
    optimizer_seconds: float = 0.0  # seconds of the optimizer


@dataclass(frozen=True)
class ParameterUse:
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

    def allreduce_bytes(self, candidate: GridCandidate, split: Sequence[range]) -> int:
        """Bytes of all sums: among the ways of a stage, and of what several stages use among all of these."""
        owners = self.owners(split)
        inside = (
            sum(len(stages) * self.sizes[name] for name, stages in owners.items())
            if candidate.graph_parallel > 1
            else 0
        )
        tied = sum(self.sizes[name] for name, stages in owners.items() if len(stages) > 1)
        return candidate.graph_parallel * inside + candidate.workers * tied


@dataclass(frozen=True)
class ClusterProfile:
    """What was measured of the workers together."""

    bandwidth: float  # bytes per second that a worker sends, all of them at once
    latency: float  # seconds of a message
    oversubscription: float = 1.0  # how many times as long a layer takes while all workers compute
    workers: int = 1
    sync_latency: float = 0.0  # seconds that all workers lose by waiting for each other once, bytes apart

    def slowdown(self, active: int) -> float:
        """How many times as long work takes that so many workers have at once: workers / crowding of them get on as if
        alone, more share what these have."""
        return 1.0 if active == 1 else max(1.0, self.oversubscription * active / self.workers)


@dataclass(frozen=True)
class GridCandidate:
    """A grid; ``halo_rows`` are the rows that other ways mirror, (sources, destinations)."""

    graph_parallel: int
    stages: int
    chunks: int
    halo_rows: tuple[int, int] = (0, 0)

    @property
    def chunks_per_partition(self) -> int:
        return self.chunks // self.graph_parallel

    @property
    def workers(self) -> int:
        return self.graph_parallel * self.stages

    @property
    def is_exact(self) -> bool:
        return self.chunks_per_partition == 1

    def __str__(self) -> str:
        if self.workers == 1:
            return "one worker"
        if self.stages == 1:
            return f"graph parallel, {self.graph_parallel} ways"
        kind = "pipeline" if self.graph_parallel == 1 else f"hybrid, {self.graph_parallel} ways ×"
        return f"{kind} {self.stages} stages, {self.chunks} chunks"


@dataclass(frozen=True)
class GridEstimate:
    """An epoch of a candidate."""

    candidate: GridCandidate
    layers: tuple[range, ...]
    seconds: float
    bytes: int

    def __str__(self) -> str:
        exact = "exact" if self.candidate.is_exact else "with history"
        return f"{self.candidate} ({exact}): {self.seconds:.3g} s, {format_size(self.bytes)} sent per epoch"


def bytes_per_epoch(layers: Sequence[LayerCost], split: Sequence[range], candidate: GridCandidate, rows: int) -> int:
    """Bytes that all workers send in the steps of an epoch, the sums of gradients apart."""
    ends = sum(2 * rows * layers[each[-1]].output_bytes for each in split[:-1])
    return ends + sum(_halo_bytes(layer, candidate) for layer in layers)


def _halo_bytes(layer: LayerCost, candidate: GridCandidate) -> int:
    """Bytes of a layer between the ways of its stage."""
    inward, outward = candidate.halo_rows
    return inward * (layer.forward_bytes + layer.return_bytes) + outward * layer.by_source_bytes


def estimate_grid(
    work: ModelCost,
    candidate: GridCandidate,
    machine: ClusterProfile,
    *,
    loads: Sequence[tuple[int, int]],
    weights: ParameterUse,
) -> GridEstimate:
    """An epoch of a model on chunks of so many (rows, edges), those of a way next to each other."""
    layers, chunks = work.layers, candidate.chunks
    rows, edges = sum(each for each, _ in loads), sum(each for _, each in loads)
    costs = [layer.seconds(rows / chunks, edges / chunks) for layer in layers]
    split = split_layers(costs, candidate.stages)
    dearest = max(sum(costs[index] for index in each) for each in split) * _imbalance_seconds(layers, candidate, loads)
    # Ways wait for each other's rows in every layer, forward and back: that takes turns with computing, while the rows
    # of a chunk pass from stage to stage beside it.
    apart = max(_halo_seconds(layers, each, candidate, machine) for each in split)
    hop = 0.0
    for each in split[:-1]:
        sent = 2 * rows / chunks * layers[each[-1]].output_bytes
        hop = max(hop, sent / machine.bandwidth + 2 * machine.latency)
    seconds = 0.0
    for slot in range(candidate.chunks_per_partition + candidate.stages - 1):
        active = min(slot + 1, candidate.stages, candidate.chunks_per_partition + candidate.stages - 1 - slot)
        shared = sum(costs) / candidate.stages * machine.slowdown(active * candidate.graph_parallel)
        seconds += max(max(dearest, shared) + apart, hop)
    # The first chunk that comes back waits for the tables of one stage after the other.
    held = (rows + max(candidate.halo_rows)) / candidate.graph_parallel
    seconds += held * work.per_pass * machine.slowdown(candidate.graph_parallel)
    seconds += work.optimizer_seconds * max(map(len, split)) / len(layers) * machine.slowdown(candidate.workers)
    summed = weights.allreduce_bytes(candidate, split)
    if candidate.graph_parallel > 1:
        seconds += 2 * summed / candidate.workers / machine.bandwidth + machine.latency
    return GridEstimate(candidate, tuple(split), seconds, bytes_per_epoch(layers, split, candidate, rows) + summed)


def _imbalance_seconds(
    layers: Sequence[LayerCost], candidate: GridCandidate, loads: Sequence[tuple[int, int]]
) -> float:
    """What chunks that are not alike cost, for chunks that are. Of those that ways work on at once the dearest counts
    (they come in random order; here the dearest with the dearest), and stages fill and drain at the pace of the dearest
    of all."""
    costs = [sum(layer.seconds(*load) for layer in layers) for load in loads]
    ways = [
        sorted(costs[way * candidate.chunks_per_partition : (way + 1) * candidate.chunks_per_partition])
        for way in range(candidate.graph_parallel)
    ]
    slots = [max(at_once) for at_once in zip(*ways, strict=True)]
    mean, more = sum(costs) / len(costs), candidate.stages - 1
    return (sum(slots) + more * max(slots)) / (len(slots) + more) / mean if mean > 0 else 1.0


def _halo_seconds(
    layers: Sequence[LayerCost], stage: range, candidate: GridCandidate, machine: ClusterProfile
) -> float:
    """Seconds in which the ways of a stage exchange rows of a chunk each."""
    if candidate.graph_parallel == 1:
        return 0.0
    sent = sum(_halo_bytes(layers[index], candidate) for index in stage)
    met = machine.sync_latency * (candidate.graph_parallel - 1) / max(machine.workers - 1, 1)
    return sent / candidate.chunks / machine.bandwidth + sum(layers[index].exchanges for index in stage) * met


def choose_grid(forecasts: Sequence[GridEstimate]) -> tuple[GridEstimate, list[str]]:
    """(the fastest, of equals the one that sends least; why, in words)."""
    best = min(forecasts, key=lambda each: (each.seconds, each.bytes))
    ordered = sorted(forecasts, key=lambda each: each.seconds)
    lines = [f"plan: {best}"]
    lines += [f"  rather than {each}" for each in ordered if each is not best]
    return best, lines
