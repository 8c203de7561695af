"""What a strategy says of an epoch before it is trained, and what it is told for that.

Bytes and rounds are counted from the parts of the graph; seconds come from a short rehearsal (``profiler``). A strategy
has ``estimate.py`` in its folder with ``foresee(config, outlook)``: forecasts for every setting worth a thought of what
the config leaves open. It raises ConfigError where it cannot train at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.job import Job

Exactness = Literal["exact", "sampled", "approximate"]
"""What an epoch learns: what the full batch of one process would, what its sampled batches would, or neither."""

MEMORY_SLACK = 1.3
"""Memory of a step by its tensors: what allocators and kernels hold besides."""


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """An epoch of a strategy with some of its words set."""

    words: Mapping[str, Any]  # the strategy group of the config that would train so
    kind: Exactness
    workers: int
    memory: float  # bytes of the largest worker
    bytes: float = 0.0  # sent in an epoch by all workers
    rounds: float = 0.0  # of a worker in an epoch
    seconds: float = 0.0  # of an epoch
    passes: float = 1.0  # over the training items in an epoch; a round of tma may have any number
    steps: int = 1  # of the optimizer in an epoch
    relay: int = 1  # steps that share what they fetch
    is_walk: bool = True  # whether all workers take every step together: such an epoch can be tried
    reasons: tuple[str, ...] = ()  # what decides
    refused: str = ""  # why it cannot be done at all

    @property
    def name(self) -> str:
        return str(self.words["name"])

    @property
    def seconds_per_pass(self) -> float:
        """Seconds to see every training item once: what strategies are compared by."""
        return self.seconds / max(self.passes, 1e-9)


@dataclass(frozen=True)
class LayerCostModel:
    """Seconds of a layer, forward and backward: of next to nothing, of a destination row, of an edge."""

    base: float
    per_row: float
    per_edge: float

    def seconds(self, rows: float, edges: float) -> float:
        return self.base + self.per_row * rows + self.per_edge * edges


@dataclass(frozen=True)
class MachineProfile:
    """What was measured of ``workers`` processes that compute at the same time."""

    workers: int
    layers: tuple[LayerCostModel, ...]
    optimizer_seconds: float  # seconds of the optimizer
    allreduce_seconds: float  # seconds of a sum of all gradients over workers
    block_slowdown: float  # how many times as long a layer takes on sampled blocks as on as much of the graph
    sampling_seconds: float  # seconds for each edge drawn and row read, to make blocks
    bandwidth: float  # bytes that a worker sends in a second while all do; rows of one machine lie in shared memory
    socket_bandwidth: float  # the same through sockets alone
    latency: float  # seconds of a round without rows
    base_memory: float  # bytes of a process that has not begun

    def layer_seconds(self, loads: Sequence[tuple[float, float]]) -> float:
        """Seconds of all layers, given (rows, edges) of each."""
        return sum(pace.seconds(*load) for pace, load in zip(self.layers, loads, strict=True))

    def sampled_step_seconds(self, loads: Sequence[tuple[float, float]]) -> float:
        """Seconds of a step on blocks."""
        return self.block_slowdown * self.layer_seconds(loads) + self.optimizer_seconds

    def transfer_seconds(self, nbytes: float, rounds: float) -> float:
        """Seconds that rows take, nothing else going on."""
        return nbytes / self.bandwidth + rounds * self.latency if self.workers > 1 else 0.0


@dataclass(frozen=True, eq=False)
class PlanningContext:
    """What a strategy is told to foresee an epoch. ``job`` has the graph, the model and the task of all workers."""

    job: Job
    single_profile: MachineProfile  # one process by itself
    shared_profile: MachineProfile  # all workers at once
    overlaps: bool  # whether rows travel while workers compute: not where these share processors
    parts: Callable[[], Sequence[Shard]]  # of ``partition``, or mincut; a part for every worker
    assignment: Callable[[StrategyConfig], NodeAssignment]
    layouts: Callable[[StrategyConfig], Sequence[ChunkLayout]]
    # What workers say who try strategies together on this machine, one after the other; None where each has a machine.
    run_trials: Callable[[Sequence[StrategyConfig]], Sequence[Mapping[str, Any]]] | None = None
    cache: dict[str, Any] = field(default_factory=dict)  # what several forecasts need, found once

    @property
    def workers(self) -> int:
        return self.job.workers

    def cached(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self.cache:
            self.cache[name] = find()
        return self.cache[name]
