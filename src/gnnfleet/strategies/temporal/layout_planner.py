"""Choice of batch size and layout from the stream, the memory of a machine and the workers on it.

Only the last event of a node in a batch updates its memory, so large batches lose updates: a batch *captures* the share
of event ends that still cause an update. The largest batch that captures enough is taken. It is shared while the shares
are worth a trainer; then memory copies are preferred to lanes, whose gradients come from the same batch. Trainers of a
memory copy share its tables, so only different copies are on different machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.units import format_size

PRODUCT = "batch × epoch × memory parallelism"
"""The three degrees of a layout, in messages."""

BATCH_SIZES = (100, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
MIN_CAPTURED_SHARE = 0.6
"""Smallest sufficient capture, relative to that of the smallest batch."""

MIN_EVENTS_PER_TRAINER = 600
"""Smallest share of a batch per trainer: below it, fixed costs of a step dominate."""

SAMPLED_EVENTS = 1 << 20
"""Number of events from which a capture curve is computed."""


@dataclass(frozen=True)
class CaptureCurve:
    """Share of event ends that batches of several sizes capture."""

    share_by_size: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, stream: EventStream) -> CaptureCurve:
        """Compute the curve from the training events, or from the last of them if they are many."""
        sample = stream.slice(max(0, len(stream) - SAMPLED_EVENTS), len(stream))
        sizes = [BATCH_SIZES[0], *(size for size in BATCH_SIZES[1:] if size <= len(sample) // 2)]
        return cls(tuple(zip(sizes, sample.capture_ratio(sizes), strict=True)))

    @property
    def batch(self) -> int:
        """Largest batch size that captures enough."""
        required = MIN_CAPTURED_SHARE * self.share_by_size[0][1]
        return max(size for size, share in self.share_by_size if share >= required)

    def __str__(self) -> str:
        return ", ".join(f"{size}: {share:.2f}" for size, share in self.share_by_size)


@dataclass(frozen=True)
class TrainerResources:
    trainers_by_host: tuple[int, ...]  # number of workers, in the order of ranks
    copy_bytes: int  # of a node memory
    memory_limit: int  # bytes per machine for node memories

    @property
    def workers(self) -> int:
        return sum(self.trainers_by_host)


def choose_layout(resources: TrainerResources, batch: int, requested: ParallelLayout) -> tuple[ParallelLayout, str]:
    """Choose (layout, reason); degrees of ``requested`` other than 0 are fixed. Raises ConfigError if none fits."""
    workers_per_machine = gcd(*resources.trainers_by_host)  # trainers of a copy must divide those of every machine
    max_copies = resources.memory_limit // max(resources.copy_bytes, 1)
    layouts, lacks_memory = [], False
    for layout in all_layouts(resources.workers):
        trainers = layout.batch_parallel * layout.epoch_parallel  # of a copy
        if not layout.fits(requested) or workers_per_machine % trainers:
            continue
        if max(resources.trainers_by_host) // trainers > max(max_copies, 1):
            lacks_memory = True
            continue
        is_small = batch // layout.batch_parallel < MIN_EVENTS_PER_TRAINER
        if not requested.batch_parallel and layout.batch_parallel > 1 and is_small:
            continue
        layouts.append(layout)
    if not layouts:
        raise ConfigError(_refusal(resources, requested, lacks_memory=lacks_memory))
    best = max(layouts, key=lambda layout: (layout.batch_parallel, layout.memory_parallel))
    return best, _reason(best, resources, batch, max_copies)


def all_layouts(workers: int) -> list[ParallelLayout]:
    divisors = [d for d in range(1, workers + 1) if workers % d == 0]
    return [ParallelLayout(i, j, workers // i // j) for i in divisors for j in divisors if workers // i % j == 0]


def _refusal(resources: TrainerResources, requested: ParallelLayout, *, lacks_memory: bool) -> str:
    fixed = [f"strategy.{name}={size}" for name, size in vars(requested).items() if size]
    request = " and ".join(fixed) if fixed else "any layout"
    if lacks_memory:
        return (
            f"a copy of the node memory takes {format_size(resources.copy_bytes)}, and a machine has "
            f"{format_size(resources.memory_limit)} for copies; {request} needs more: raise strategy.epoch_parallel "
            "or strategy.memory_budget"
        )
    rule = f"{request} does not fit {resources.workers} workers: {PRODUCT} must be the number of workers"
    if len(resources.trainers_by_host) == 1:
        return rule
    counts = ", ".join(map(str, resources.trainers_by_host))
    return (
        f"{rule}, and batch_parallel × epoch_parallel must divide the workers of every machine ({counts}), because "
        "they share one memory"
    )


def _reason(layout: ParallelLayout, resources: TrainerResources, batch: int, max_copies: int) -> str:
    machines, copies, lanes = len(resources.trainers_by_host), layout.memory_parallel, layout.epoch_parallel
    share = f"batch of {batch} per trainer"
    if layout.batch_parallel > 1:
        share = (
            f"{layout.batch_parallel} trainers share a batch of {batch} ({batch // layout.batch_parallel} events each)"
        )
    across = f" on {machines} machines" if machines > 1 else ""
    return (
        f"Layout {PRODUCT} = {layout}: {share}; {copies} memory {'copies' if copies > 1 else 'copy'}{across} of "
        f"{format_size(resources.copy_bytes)} (a machine has room for {max_copies}); {lanes} "
        f"{'lanes' if lanes > 1 else 'lane'} per copy."
    )


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate by iteration: lr · (warmup from 1 to ``factor``) / (1 + decay · epochs).

    Gradients are means over several batches, which allows larger steps. The rate grows during warmup, while the
    optimizer's moments are estimated from few steps. It decays because memories depend on the weights of all earlier
    steps, and evaluations replay them with the last weights.
    """

    lr: float
    factor: float = 1.0
    warmup: int = 0  # iterations
    decay: float = 0.0
    epoch: float = 1.0  # iterations of an epoch

    def at(self, iteration: int) -> float:
        scale = 1 + (self.factor - 1) * min(1.0, iteration / self.warmup) if self.warmup else self.factor
        return self.lr * scale / (1 + self.decay * iteration / self.epoch)
