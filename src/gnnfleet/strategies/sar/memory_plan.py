"""What a worker may hold, and what that allows: rows kept for backward, prefetch, larger groups.

A worker needs what it has after the build, the tensors of a step, and the rows of other ranks: those on their way in
and out for one exchange at a time, and those that are kept. The leanest way is tried first; more is taken as far as it
fits, in the order in which it pays: prefetch hides waiting, kept rows spare a third of the traffic where backward would
fetch again, larger groups spare rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gnnfleet.comm.halo_exchange import Routes
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import Sketch, Trip, Way
from gnnfleet.strategies.estimates import SLACK
from gnnfleet.units import show_size


@dataclass(frozen=True)
class Choice:
    """How steps run."""

    group: int
    prefetch: int
    keep: tuple[int, ...] = ()  # layers

    def __str__(self) -> str:
        kept = f", rows of layers {', '.join(str(layer + 1) for layer in self.keep)} kept" if self.keep else ""
        return f"group {self.group}, prefetch {self.prefetch}{kept}"


@dataclass(frozen=True)
class Given:
    """What the user has decided; None leaves it open."""

    group: int | None = None
    prefetch: int | None = None
    keep: bool | None = None


@dataclass(frozen=True)
class Needs:
    """What this rank needs for a step."""

    resident: float  # bytes it has already
    tensors: float  # of a step, without rows of others
    sketch: Sketch
    routes: Callable[[Way], Routes]

    def bytes(self, choice: Choice) -> float:
        """At the peak of a step."""
        moving = max((self._moving(trip, choice) for trip in self.sketch.trips), default=0.0)
        kept = sum(self._rows(way, each, "need") for trip in self._kept(choice) for way, each in trip.there)
        return self.resident + SLACK * (self.tensors + moving + kept)

    def _kept(self, choice: Choice) -> list[Trip]:
        return [trip for trip in self.sketch.trips if trip.kept and trip.layer in choice.keep]

    def _rows(self, way: Way, each: int, side: str) -> float:
        return float(sum(_counts(self.routes(way), side))) * each

    def _moving(self, trip: Trip, choice: Choice) -> float:
        """The largest run of neighbouring rounds that are in memory at once, coming and going."""
        if trip.again and trip.layer in choice.keep:
            trip = replace(trip, there=())
        ways = [(way, each, ("need", "give")) for way, each in (*trip.there, *trip.home)]
        ranks = len(self.routes(ways[0][0]).need) if ways else 0
        loads = [
            sum(_counts(self.routes(way), side)[q] * each for way, each, sides in ways for side in sides)
            for q in range(ranks)
        ]
        at_once = min((1 + choice.prefetch) * choice.group, max(ranks - 1, 0))
        return float(sum(sorted(loads, reverse=True)[:at_once]))


def _counts(routes: Routes, side: str) -> Sequence[int]:
    return routes.need if side == "need" else [len(rows) for rows in routes.give]


Worst = Callable[[float], float]
"""The largest of a number over all ranks, which call it together."""


def choose(needs: Needs, limit: int, ranks: int, given: Given, worst: Worst) -> tuple[Choice, str]:
    """(how to run within ``limit`` bytes per worker, why); raises ConfigError with what is needed at least."""
    layers = sorted({trip.layer for trip in needs.sketch.trips if trip.kept})
    choice = Choice(
        given.group or 1, 0 if given.prefetch is None else given.prefetch, tuple(layers) if given.keep else ()
    )
    total = worst(needs.bytes(choice))
    if total > limit:
        raise ConfigError(
            f"a worker needs {show_size(total)} at least ({choice}), found --memory {show_size(limit)}: "
            "take more workers or more memory, or a smaller model"
        )
    refused = ""
    for word, value in _upgrades(ranks, layers, given):
        wanted = _with(choice, word, value)
        needed = worst(needs.bytes(wanted))
        if needed <= limit:
            choice, total = wanted, needed
        elif not refused:
            refused = f"; {wanted} would take {show_size(needed)}"
    return choice, f"{choice}: {show_size(total)} of {show_size(limit)} per worker{refused}"


def _upgrades(ranks: int, layers: Sequence[int], given: Given) -> list[tuple[str, int]]:
    """(word, value), in the order in which they are tried."""
    found = [("prefetch", 1)] if given.prefetch is None else []
    found += [("keep", layer) for layer in layers] if given.keep is None else []
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return found + ([("group", size) for size in (*sizes, ranks)] if given.group is None else [])


def _with(choice: Choice, word: str, value: int) -> Choice:
    if word == "keep":
        return replace(choice, keep=tuple(sorted({*choice.keep, value})))
    return replace(choice, prefetch=value) if word == "prefetch" else replace(choice, group=value)
