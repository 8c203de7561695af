"""What a worker may hold, and what that allows: rows kept for backward, prefetch, larger groups.

A worker needs what it has after the build, the tensors of a step, and the rows of other ranks: those on their way in
and out for one exchange at a time, and those that are kept. The leanest way is tried first; more is taken as far as it
fits, in the order in which it pays: prefetch hides waiting, kept rows spare a third of the traffic where backward would
fetch again, larger groups spare rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.estimates import MEMORY_SLACK
from gnnfleet.units import format_size


@dataclass(frozen=True)
class MemoryChoice:
    """How steps run."""

    group: int
    prefetch: int
    cached_layers: tuple[int, ...] = ()  # layers

    def __str__(self) -> str:
        kept = (
            f", rows of layers {', '.join(str(layer + 1) for layer in self.cached_layers)} kept"
            if self.cached_layers
            else ""
        )
        return f"group {self.group}, prefetch {self.prefetch}{kept}"


@dataclass(frozen=True)
class UserChoice:
    """What the user has decided; None leaves it open."""

    group: int | None = None
    prefetch: int | None = None
    cached_layers: bool | None = None


@dataclass(frozen=True)
class MemoryNeeds:
    """What this rank needs for a step."""

    resident: float  # bytes it has already
    peak_bytes: float  # of a step, without rows of others
    trace: StepTrace
    plans: Callable[[RouteKey], ExchangePlan]

    def bytes(self, choice: MemoryChoice) -> float:
        """At the peak of a step."""
        moving = max((self._moving(trip, choice) for trip in self.trace.exchanges), default=0.0)
        kept = sum(self._rows(way, each, "need") for trip in self._kept(choice) for way, each in trip.sent_bytes)
        return self.resident + MEMORY_SLACK * (self.peak_bytes + moving + kept)

    def _kept(self, choice: MemoryChoice) -> list[TracedExchange]:
        return [trip for trip in self.trace.exchanges if trip.cached_bytes and trip.layer in choice.cached_layers]

    def _rows(self, way: RouteKey, each: int, side: str) -> float:
        return float(sum(_counts(self.plans(way), side))) * each

    def _moving(self, trip: TracedExchange, choice: MemoryChoice) -> float:
        """The largest run of neighbouring rounds that are in memory at once, coming and going."""
        if trip.is_refetch and trip.layer in choice.cached_layers:
            trip = replace(trip, sent_bytes=())
        ways = [(way, each, ("need", "give")) for way, each in (*trip.sent_bytes, *trip.returned_bytes)]
        ranks = len(self.plans(ways[0][0]).recv_counts) if ways else 0
        loads = [
            sum(_counts(self.plans(way), side)[q] * each for way, each, sides in ways for side in sides)
            for q in range(ranks)
        ]
        at_once = min((1 + choice.prefetch) * choice.group, max(ranks - 1, 0))
        return float(sum(sorted(loads, reverse=True)[:at_once]))


def _counts(routes: ExchangePlan, side: str) -> Sequence[int]:
    return routes.recv_counts if side == "need" else [len(rows) for rows in routes.send_rows]


WorstOverRanks = Callable[[float], float]
"""The largest of a number over all ranks, which call it together."""


def choose_memory_plan(
    needs: MemoryNeeds, limit: int, ranks: int, given: UserChoice, worst: WorstOverRanks
) -> tuple[MemoryChoice, str]:
    """(how to run within ``limit`` bytes per worker, why); raises ConfigError with what is needed at least."""
    layers = sorted({trip.layer for trip in needs.trace.exchanges if trip.cached_bytes})
    choice = MemoryChoice(
        given.group or 1, 0 if given.prefetch is None else given.prefetch, tuple(layers) if given.cached_layers else ()
    )
    total = worst(needs.bytes(choice))
    if total > limit:
        raise ConfigError(
            f"a worker needs {format_size(total)} at least ({choice}), found --memory {format_size(limit)}: "
            "take more workers or more memory, or a smaller model"
        )
    refused = ""
    for word, value in _upgrades(ranks, layers, given):
        wanted = _with(choice, word, value)
        needed = worst(needs.bytes(wanted))
        if needed <= limit:
            choice, total = wanted, needed
        elif not refused:
            refused = f"; {wanted} would take {format_size(needed)}"
    return choice, f"{choice}: {format_size(total)} of {format_size(limit)} per worker{refused}"


def _upgrades(ranks: int, layers: Sequence[int], given: UserChoice) -> list[tuple[str, int]]:
    """(word, value), in the order in which they are tried."""
    found = [("prefetch", 1)] if given.prefetch is None else []
    found += [("keep", layer) for layer in layers] if given.cached_layers is None else []
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return found + ([("group", size) for size in (*sizes, ranks)] if given.group is None else [])


def _with(choice: MemoryChoice, word: str, value: int) -> MemoryChoice:
    if word == "keep":
        return replace(choice, cached_layers=tuple(sorted({*choice.cached_layers, value})))
    return replace(choice, prefetch=value) if word == "prefetch" else replace(choice, group=value)
