"""Estimate an epoch on every grid of graph parallelism × stages × chunks, and choose the fastest.

A layer takes a fixed time per chunk and a time per row and in-edge. Stages work side by side: n chunks need n + S − 1
slots, each as long as the slowest stage or the transfer beside it. Workers that share cores take at least as long as
their total work needs. Graph-parallel ranks of a stage exchange halo rows in every layer, forward and backward.
N rows, S stages, W graph-parallel ranks, C chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.strategies.pipe.schedule import split_layers
from gnnfleet.units import format_size

Owners = Mapping[str, list[int]]
"""{parameter: the stages that use it}."""


@dataclass(frozen=True)
class LayerCost:
    """Seconds of a layer, forward and backward; bytes of a row as sent."""

    base: float  # seconds of any chunk
    per_load: float  # seconds of a row or of an in-edge of a chunk
    output_bytes: int  # passed to the next stage, the tensor carried past layers included
    forward_bytes: int  # of a source row in the halo
    by_source_bytes: int  # of a destination row in the halo, for backward
    return_bytes: int  # of a gradient that returns to its source row
    parameters: tuple[str, ...] = ()  # that the layer uses

    def seconds(self, load: float) -> float:
        return self.base + self.per_load * load

    @property
    def exchanges(self) -> int:
        """Number of halo exchanges per chunk."""
        return bool(self.forward_bytes) + bool(self.by_source_bytes) + bool(self.return_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a row between stages: its activation forward, the gradient of it backward."""
        return 2 * self.output_bytes

    def halo_bytes(self, grid: GridCandidate) -> int:
        """Bytes of an epoch between the graph-parallel ranks of a stage."""
        sources, destinations = grid.halo_rows
        return sources * (self.forward_bytes + self.return_bytes) + destinations * self.by_source_bytes


@dataclass(frozen=True)
class ModelCost:
    """Measured layers of a model and the bytes that each parameter adds to a sum of gradients."""

    layers: tuple[LayerCost, ...]
    parameter_bytes: Mapping[str, int]
    speedup_alone: float = 1.0  # of a worker that has the threads of those that wait

    def owners(self, stages: Sequence[range]) -> Owners:
        """The stages that use each parameter; one that no layer uses reads the output, so the last stage has it."""
        used = [{name for index in stage for name in self.layers[index].parameters} for stage in stages]
        last = [len(stages) - 1]
        return {
            name: [number for number, names in enumerate(used) if name in names] or last
            for name in self.parameter_bytes
        }

    def allreduce_bytes(self, grid: GridCandidate, stages: Sequence[range]) -> int:
        """Bytes of all sums: over the ranks of a stage, and over the stages that share a parameter."""
        owners = self.owners(stages)
        within = sum(len(users) * self.parameter_bytes[name] for name, users in owners.items())
        across = sum(self.parameter_bytes[name] for name, users in owners.items() if len(users) > 1)
        return (grid.graph_parallel * within if grid.graph_parallel > 1 else 0) + grid.workers * across


@dataclass(frozen=True)
class ClusterProfile:
    """Links between workers and the cores that they share."""

    bandwidth: float = float("inf")  # bytes per second that a worker sends while all do
    latency: float = 0.0  # seconds of a message
    oversubscription: float = 1.0  # slowdown while all workers compute


@dataclass(frozen=True)
class GridCandidate:
    """A grid; ``halo_rows`` are (sources, destinations) that other graph-parallel ranks read."""

    graph_parallel: int
    stages: int
    chunks: int
    halo_rows: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, layout: ChunkLayout, workers: int) -> GridCandidate:
        return cls(layout.partitions, workers // layout.partitions, layout.chunks, layout.halo_rows)

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
            return f"graph parallel, {self.graph_parallel} workers"
        kind = "pipeline" if self.graph_parallel == 1 else f"hybrid, {self.graph_parallel} graph-parallel workers ×"
        return f"{kind} {self.stages} stages, {self.chunks} chunks"


def feasible_grids(grids: Sequence[GridCandidate], layers: int, *, batch_norm: bool) -> list[GridCandidate]:
    """The grids that can train a model; raises ConfigError if there is none."""
    feasible = [grid for grid in grids if grid.stages <= layers and (grid.is_exact or not batch_norm)]
    if feasible:
        return feasible
    stages = grids[0].stages
    if stages > layers:
        raise ConfigError(
            f"{stages} stages need {stages} layers, the model has {layers}: raise strategy.graph_parallel"
        )
    raise ConfigError(
        "batch norm needs all nodes at once: set model.norm=layer, or strategy.chunks equal to strategy.graph_parallel"
    )


@dataclass(frozen=True)
class GridEstimate:
    candidate: GridCandidate
    layers: tuple[range, ...]  # of each stage
    seconds: float
    bytes: int  # sent by all workers

    def __str__(self) -> str:
        exactness = "exact" if self.candidate.is_exact else "with history"
        return f"{self.candidate} ({exactness}): {self.seconds:.3g} s, {format_size(self.bytes)} sent per epoch"


def estimate_grid(
    model: ModelCost, grid: GridCandidate, cluster: ClusterProfile, *, rows: int, loads: Sequence[int]
) -> GridEstimate:
    """An epoch on chunks of these loads (rows plus in-edges), those of a partition next to each other."""
    layers = model.layers
    mean_load = sum(loads) / grid.chunks
    costs = [layer.seconds(mean_load) for layer in layers]
    stages = split_layers(costs, grid.stages)
    slot = max(sum(costs[index] for index in stage) for stage in stages) * _imbalance(grid, loads)
    sent_rows = rows / grid.chunks
    # Transfers between stages overlap with computation, halo exchanges within a stage do not.
    transfer = max(
        (sent_rows * layers[stage[-1]].stage_bytes / cluster.bandwidth + 2 * cluster.latency for stage in stages[:-1]),
        default=0.0,
    )
    halo = max(_halo_seconds(layers, stage, grid, cluster) for stage in stages)
    slots = grid.chunks_per_partition + grid.stages - 1
    work = grid.chunks * sum(costs)
    if grid.workers == 1:
        compute = work / model.speedup_alone
    else:
        compute = max(slots * max(slot, transfer), work * cluster.oversubscription / grid.workers)
    allreduce_bytes = model.allreduce_bytes(grid, stages)
    allreduce = 2 * allreduce_bytes / grid.workers / cluster.bandwidth
    between_stages = sum(rows * layers[stage[-1]].stage_bytes for stage in stages[:-1])
    nbytes = between_stages + sum(layer.halo_bytes(grid) for layer in layers) + allreduce_bytes
    return GridEstimate(grid, tuple(stages), compute + slots * halo + allreduce, nbytes)


def _imbalance(grid: GridCandidate, loads: Sequence[int]) -> float:
    """Slowdown by unequal chunks: graph-parallel ranks wait for the largest of those they work on together."""
    per_partition = grid.chunks_per_partition
    partitions = [
        sorted(loads[number * per_partition : (number + 1) * per_partition]) for number in range(grid.graph_parallel)
    ]
    largest: list[int] = [max(together) for together in zip(*partitions, strict=True)]
    return float(sum(largest) * grid.graph_parallel / max(1, sum(loads)))


def _halo_seconds(layers: Sequence[LayerCost], stage: range, grid: GridCandidate, cluster: ClusterProfile) -> float:
    """Seconds that the halo exchanges of a stage add to a slot."""
    if grid.graph_parallel == 1:
        return 0.0
    nbytes = sum(layers[index].halo_bytes(grid) for index in stage) / grid.chunks
    messages = sum(layers[index].exchanges for index in stage) * (grid.graph_parallel - 1)
    return nbytes / cluster.bandwidth + messages * cluster.latency


def choose_grid(estimates: Sequence[GridEstimate]) -> tuple[GridEstimate, list[str]]:
    """(the fastest, of equals the one that sends least; the estimates as lines of text)."""
    best = min(estimates, key=lambda estimate: (estimate.seconds, estimate.bytes))
    ordered = sorted(estimates, key=lambda estimate: estimate.seconds)
    return best, [f"plan: {best}", *(f"  rather than {estimate}" for estimate in ordered if estimate is not best)]
