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
from gnnfleet.strategies.temporal.schedule import Shape
from gnnfleet.units import show_size

BATCHES = (100, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
CAPTURED = 0.6
"""Of what the smallest batch captures, the least that is enough."""

LEAST_PIECE = 600
"""Events of a batch that are worth a trainer: with fewer the fixed costs of a step show."""

LOOKED_AT = 1 << 20
"""Events that the curve is counted on."""


@dataclass(frozen=True)
class Curve:
    """What batches of several sizes capture."""

    shares: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, stream: EventStream) -> Curve:
        """Of the training events, or the last of them where they are many."""
        looked_at = stream.slice(max(0, len(stream) - LOOKED_AT), len(stream))
        sizes = [BATCHES[0], *(size for size in BATCHES[1:] if size <= len(looked_at) // 2)]
        return cls(tuple(zip(sizes, looked_at.captured(sizes), strict=True)))

    @property
    def batch(self) -> int:
        """The largest that captures enough."""
        least = CAPTURED * self.shares[0][1]
        return max(size for size, share in self.shares if share >= least)

    def __str__(self) -> str:
        return ", ".join(f"{size}: {share:.2f}" for size, share in self.shares)


@dataclass(frozen=True)
class Trainers:
    """What there is to train with."""

    machines: tuple[int, ...]  # workers of each, in the order of ranks
    copy_bytes: int  # of a memory
    room: int  # bytes of a machine that memories may take

    @property
    def workers(self) -> int:
        return sum(self.machines)


def arrange(trainers: Trainers, batch: int, given: Shape) -> tuple[Shape, str]:
    """(the arrangement, why); what is not 0 in ``given`` the user decided. Raises ConfigError where none fits."""
    together = gcd(*trainers.machines)  # a copy's trainers must be a part of every machine
    held = trainers.room // max(trainers.copy_bytes, 1)
    fitting, tight = [], False
    for shape in shapes_of(trainers.workers):
        if any(wanted not in (0, found) for wanted, found in zip(_sizes(given), _sizes(shape), strict=True)):
            continue
        if together % (shape.share * shape.lanes):
            continue
        if max(trainers.machines) // (shape.share * shape.lanes) > max(held, 1):
            tight = True
            continue
        if not given.share and shape.share > 1 and batch // shape.share < LEAST_PIECE:
            continue
        fitting.append(shape)
    if not fitting:
        raise ConfigError(_refusal(trainers, given, tight=tight))
    best = max(fitting, key=lambda shape: (shape.share, shape.copies))
    return best, _reason(best, trainers, batch, held)


def shapes_of(workers: int) -> list[Shape]:
    """All arrangements of so many trainers."""
    divisors = [d for d in range(1, workers + 1) if workers % d == 0]
    return [Shape(i, j, workers // i // j) for i in divisors for j in divisors if workers // i % j == 0]


def _sizes(shape: Shape) -> tuple[int, int, int]:
    return shape.share, shape.lanes, shape.copies


def _refusal(trainers: Trainers, given: Shape, *, tight: bool) -> str:
    words = [f"strategy.{name}={size}" for name, size in vars(given).items() if size]
    asked = " and ".join(words) if words else "any arrangement"
    if tight:
        return (
            f"copies of the memory take {show_size(trainers.copy_bytes)} each and {show_size(trainers.room)} are free "
            f"for them on a machine: set strategy.lanes or --memory higher (found {asked})"
        )
    if len(trainers.machines) > 1:
        return (
            f"{asked} does not fit {trainers.workers} workers on machines of {_listed(trainers.machines)}: "
            "share × lanes × copies must be the number of workers, and share × lanes divide those of every machine, "
            "since they share one memory"
        )
    return f"{asked} does not fit {trainers.workers} workers: share × lanes × copies must be the number of workers"


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _reason(shape: Shape, trainers: Trainers, batch: int, held: int) -> str:
    words = []
    if shape.share > 1:
        words.append(f"{shape.share} trainers share a batch of {batch} (pieces of {batch // shape.share})")
    else:
        words.append(f"every trainer has batches of {batch} to itself")
    where = f" on {len(trainers.machines)} machines" if len(trainers.machines) > 1 else ""
    size = show_size(trainers.copy_bytes)
    words.append(
        f"{shape.copies} {'copies' if shape.copies > 1 else 'copy'} of the memory{where}, {size} each, "
        f"room for {held} on a machine"
    )
    words.append(f"{shape.lanes} {'lanes' if shape.lanes > 1 else 'lane'} on each")
    return f"plan: share × lanes × copies = {shape}: {'; '.join(words)}"


@dataclass(frozen=True)
class Pace:
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
