"""How large a batch, and how trainers are arranged: from the stream, the memory of a machine and who shares one.

A node hears of a batch once, however often it occurs there (its last event counts), so large batches lose updates: the
share of ends of events that are still heard of is what a batch *captures*. The largest batch is taken that captures
enough; it is shared while the pieces are large enough to be worth a trainer; then copies of the memory are preferred to
lanes, whose gradients are of the same batch. Only copies cross machines: trainers of one copy share its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.units import format_size

BATCH_SIZES = (100, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
MIN_CAPTURED_SHARE = 0.6
"""Of what the smallest batch captures, the least that is enough."""

MIN_EVENTS_PER_TRAINER = 600
"""Events of a batch that are worth a trainer: with fewer the fixed costs of a step show."""

SAMPLED_EVENTS = 1 << 20
"""Events that the curve is counted on."""


@dataclass(frozen=True)
class CaptureCurve:
    """What batches of several sizes capture."""

    share_by_size: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, stream: EventStream) -> CaptureCurve:
        """Of the training events, or the last of them where they are many."""
        looked_at = stream.slice(max(0, len(stream) - SAMPLED_EVENTS), len(stream))
        sizes = [BATCH_SIZES[0], *(size for size in BATCH_SIZES[1:] if size <= len(looked_at) // 2)]
        return cls(tuple(zip(sizes, looked_at.capture_ratio(sizes), strict=True)))

    @property
    def batch(self) -> int:
        """The largest that captures enough."""
        least = MIN_CAPTURED_SHARE * self.share_by_size[0][1]
        return max(size for size, share in self.share_by_size if share >= least)

    def __str__(self) -> str:
        return ", ".join(f"{size}: {share:.2f}" for size, share in self.share_by_size)


@dataclass(frozen=True)
class TrainerResources:
    """What there is to train with."""

    trainers_by_host: tuple[int, ...]  # workers of each, in the order of ranks
    copy_bytes: int  # of a memory
    memory_limit: int  # bytes of a machine that memories may take

    @property
    def workers(self) -> int:
        return sum(self.trainers_by_host)


def choose_layout(trainers: TrainerResources, batch: int, given: ParallelLayout) -> tuple[ParallelLayout, str]:
    """(the arrangement, why); what is not 0 in ``given`` the user decided. Raises ConfigError where none fits."""
    together = gcd(*trainers.trainers_by_host)  # a copy's trainers must be a part of every machine
    held = trainers.memory_limit // max(trainers.copy_bytes, 1)
    fitting, tight = [], False
    for shape in all_layouts(trainers.workers):
        if any(wanted not in (0, found) for wanted, found in zip(_sizes(given), _sizes(shape), strict=True)):
            continue
        if together % (shape.batch_parallel * shape.epoch_parallel):
            continue
        if max(trainers.trainers_by_host) // (shape.batch_parallel * shape.epoch_parallel) > max(held, 1):
            tight = True
            continue
        if (
            not given.batch_parallel
            and shape.batch_parallel > 1
            and batch // shape.batch_parallel < MIN_EVENTS_PER_TRAINER
        ):
            continue
        fitting.append(shape)
    if not fitting:
        raise ConfigError(_refusal(trainers, given, tight=tight))
    best = max(fitting, key=lambda shape: (shape.batch_parallel, shape.memory_parallel))
    return best, _reason(best, trainers, batch, held)


def all_layouts(workers: int) -> list[ParallelLayout]:
    """All arrangements of so many trainers."""
    divisors = [d for d in range(1, workers + 1) if workers % d == 0]
    return [ParallelLayout(i, j, workers // i // j) for i in divisors for j in divisors if workers // i % j == 0]


def _sizes(shape: ParallelLayout) -> tuple[int, int, int]:
    return shape.batch_parallel, shape.epoch_parallel, shape.memory_parallel


def _refusal(trainers: TrainerResources, given: ParallelLayout, *, tight: bool) -> str:
    words = [f"strategy.{name}={size}" for name, size in vars(given).items() if size]
    asked = " and ".join(words) if words else "any arrangement"
    if tight:
        return (
            f"copies of the memory take {format_size(trainers.copy_bytes)} each and {format_size(trainers.memory_limit)} are free "
            f"for them on a machine: set strategy.epoch_parallel or --memory higher (found {asked})"
        )
    if len(trainers.trainers_by_host) > 1:
        return (
            f"{asked} does not fit {trainers.workers} workers on machines of {_listed(trainers.trainers_by_host)}: "
            "share × lanes × copies must be the number of workers, and share × lanes divide those of every machine, "
            "since they share one memory"
        )
    return f"{asked} does not fit {trainers.workers} workers: share × lanes × copies must be the number of workers"


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _reason(shape: ParallelLayout, trainers: TrainerResources, batch: int, held: int) -> str:
    words = []
    if shape.batch_parallel > 1:
        words.append(
            f"{shape.batch_parallel} trainers share a batch of {batch} (pieces of {batch // shape.batch_parallel})"
        )
    else:
        words.append(f"every trainer has batches of {batch} to itself")
    where = f" on {len(trainers.trainers_by_host)} machines" if len(trainers.trainers_by_host) > 1 else ""
    size = format_size(trainers.copy_bytes)
    words.append(
        f"{shape.memory_parallel} {'copies' if shape.memory_parallel > 1 else 'copy'} of the memory{where}, {size} each, "
        f"room for {held} on a machine"
    )
    words.append(f"{shape.epoch_parallel} {'lanes' if shape.epoch_parallel > 1 else 'lane'} on each")
    return f"plan: share × lanes × copies = {shape}: {'; '.join(words)}"


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate over iterations: gradients are means over ``lanes · copies`` batches, so steps may be larger;
    at first they are not, since moments are of few steps. It falls as 1 / (1 + decay · epochs): memories are made by
    the weights of all steps before and walked through anew by the last ones, so weights have to come to rest."""

    lr: float
    factor: float = 1.0
    warmup: int = 0  # iterations
    decay: float = 0.0
    epoch: float = 1.0  # iterations

    def at(self, iteration: int) -> float:
        grown = 1 + (self.factor - 1) * min(1.0, iteration / self.warmup) if self.warmup else self.factor
        return self.lr * grown / (1 + self.decay * iteration / self.epoch)
