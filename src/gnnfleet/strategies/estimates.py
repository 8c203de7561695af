"""Cost estimates of an epoch, and the measurements and partitions that strategies compute them from.

Bytes and rounds are counted from the partitions of the graph. Seconds come from one profile of this machine (``planner.
profiler``) and are within about 30 %; if epochs are short, the planner measures real ones instead.
``StrategySpec.estimate`` returns an estimate for every candidate of the settings that a config leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.job import EventJob, Job

Exactness = Literal["exact", "sampled", "approximate"]
"""Equal to the full batch of one process, to the sampled batches of one process, or to neither."""

MEMORY_SLACK = 1.3
"""Memory of a step relative to its tensors: allocators and kernels hold more."""

LOCAL_BANDWIDTH, LATENCY = 1e9, 1e-4
"""Bytes per second between workers of one machine, and seconds of a message: assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """An epoch of a strategy under some settings."""

    settings: Mapping[str, Any]  # the strategy group of the config
    kind: Exactness
    workers: int
    memory: float  # bytes of the largest worker
    bytes: float = 0.0  # sent in an epoch by all workers
    rounds: float = 0.0  # of a worker in an epoch
    seconds: float = 0.0  # of an epoch
    passes: float = 1.0  # over the training items in an epoch; a round of tma may have any number
    steps: int = 1  # of the optimizer in an epoch
    batches_per_fetch: int = 1  # steps that share an exchange
    is_synchronous: bool = True  # all workers take each step together, so that a trial can measure an epoch
    reasons: tuple[str, ...] = ()
    refused: str = ""  # reason why these settings cannot train

    @property
    def name(self) -> str:
        return str(self.settings["name"])

    @property
    def seconds_per_pass(self) -> float:
        """Seconds to see every training item once; strategies are compared by it."""
        return self.seconds / max(self.passes, 1e-9)


@dataclass(frozen=True)
class MachineProfile:
    """Speed and memory of one of ``workers`` processes."""

    workers: int
    row_seconds: float  # full batch, forward and backward: a row of a layer
    edge_seconds: float  # full batch, forward and backward: an edge of a layer
    block_seconds: float  # sampled step with its optimizer: a row read or an edge drawn
    sampling_seconds: float  # to make blocks: a row read or an edge drawn
    base_memory: float  # bytes of a process before training
    bandwidth: float = LOCAL_BANDWIDTH  # bytes per second that a worker sends while all do
    latency: float = LATENCY  # seconds of a round without rows

    def shared_by(self, workers: int) -> MachineProfile:
        """The profile of each of ``workers`` processes that share the cores of this machine."""
        names = "row_seconds", "edge_seconds", "block_seconds", "sampling_seconds"
        return replace(self, workers=workers, **{name: getattr(self, name) * workers for name in names})

    def linked(self, workers: int, bandwidth: float) -> MachineProfile:
        """The profile of each of ``workers`` machines of this kind."""
        return replace(self, workers=workers, bandwidth=bandwidth)

    def full_batch_seconds(self, loads: Sequence[tuple[float, float]]) -> float:
        """Seconds of a step, given (rows, edges) of every layer."""
        return sum(self.row_seconds * rows + self.edge_seconds * edges for rows, edges in loads)

    def transfer_seconds(self, nbytes: float, rounds: float) -> float:
        """Seconds of an exchange without overlap."""
        return nbytes / self.bandwidth + rounds * self.latency if self.workers > 1 else 0.0

    def allreduce_seconds(self, nbytes: float) -> float:
        """Seconds of a sum of gradients over all workers."""
        return self.transfer_seconds(2 * nbytes, 2)


@dataclass(frozen=True, eq=False)
class PlanningContext:
    """Inputs of an estimate. ``job`` has the graph, the model and the task of all workers."""

    job: Job
    single_profile: MachineProfile  # of one process by itself
    shared_profile: MachineProfile  # of each worker, while all run
    overlaps: bool  # exchanges overlap with computation: workers do not share cores
    parts: Callable[[], Sequence[Shard]]  # a part for every worker, by ``partition`` or mincut
    assignment: Callable[[StrategyConfig], NodeAssignment]
    layouts: Callable[[StrategyConfig], Sequence[ChunkLayout]]
    cache: dict[str, Any] = field(default_factory=dict)  # values shared by several estimates

    @property
    def workers(self) -> int:
        return self.job.workers

    def cached(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.cache:
            self.cache[name] = compute()
        return self.cache[name]


@dataclass(frozen=True)
class TrialTiming:
    seconds: float = 0.0  # of an epoch
    memory: float = 0.0  # peak bytes of the largest worker
    refused: str = ""  # reason why these settings cannot train


@dataclass(frozen=True, eq=False)
class EventPlanningContext:
    """Inputs of an estimate on an event stream; ``bandwidth`` is set if every worker has its own machine."""

    job: EventJob
    workers: int
    # Trials on this machine: (number of workers, [(settings of the strategy, steps of an epoch)]).
    run_trials: Callable[[int, Sequence[tuple[StrategyConfig, int]]], Sequence[TrialTiming]]
    bandwidth: float | None = None
