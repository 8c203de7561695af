"""Negative destinations of events: functions of seed, sweep, event and set, equal for any number of workers.

N destinations, n events, k negatives each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.sampling.negatives import EVALUATION, SINGLE, TRAINING
from gnnfleet.ops.draws import DrawKey, Draws, Purpose

MAX_REJECTION_COUNT = 49
"""Default number of negatives per event in evaluations that do not rank all destinations."""


@dataclass(frozen=True, eq=False)
class NegativeSampler:
    """Draws distinct destinations other than the event's own, uniformly."""

    destinations: Tensor  # [N] int64 ascending
    seed: int = 0

    def for_training(self, events: Tensor, positive: Tensor, *, sweep: int, number: int = 0, count: int = 1) -> Tensor:
        """[n, count] for events with numbers [n] and true destinations [n], in set ``number`` of a sweep."""
        draws = DrawKey(self.seed, sweep).draws(Purpose.NEGATIVE, TRAINING, number)
        return self._draw(draws, events, positive, count)

    def for_evaluation(self, events: Tensor, positive: Tensor, *, count: int = MAX_REJECTION_COUNT) -> Tensor:
        """[n, count] for validation and test; they depend on the seed and the event only."""
        return self._draw(DrawKey(self.seed).draws(Purpose.NEGATIVE, EVALUATION), events, positive, count)

    def single_column(self, events: Tensor, count: int) -> Tensor:
        """[n] random column of ``for_evaluation`` to use as the single negative of each event."""
        return (DrawKey(self.seed).draws(Purpose.NEGATIVE, SINGLE).uniforms_at(events)[:, 0] * count).long()

    def _draw(self, draws: Draws, events: Tensor, positive: Tensor, count: int) -> Tensor:
        """Floyd's random subset of the other positions: uniform as a set, but not column by column."""
        if count >= len(self.destinations):
            raise ConfigError(
                f"{count} negatives need {count + 1} destinations, found {len(self.destinations)}: use fewer negatives"
            )
        total = len(self.destinations)
        position = torch.searchsorted(self.destinations, positive).clamp_(max=total - 1)
        position[self.destinations[position] != positive] = total  # a new node: no destination is excluded
        others = total - (position < total).long()
        uniforms = draws.uniforms_at(events, count)
        chosen = torch.empty(len(events), count, dtype=torch.int64)
        for column in range(count):
            last = others - count + column
            pick = (uniforms[:, column] * (last + 1)).long()
            repeated = (chosen[:, :column] == pick[:, None]).any(1)
            chosen[:, column] = torch.where(repeated, last, pick)
        return self.destinations[chosen + (chosen >= position[:, None])]


class AllDestinations:
    """TGB's full rule: all destinations are negatives except those of events with the same source and time."""

    def __init__(self, stream: EventStream) -> None:
        # Takes the whole stream: events of one time may lie in several batches.
        self.destinations = stream.destinations
        time = torch.zeros(len(stream), dtype=torch.int64)
        time[1:] = (stream.t[1:] != stream.t[:-1]).cumsum(0)
        self._key = time * stream.num_nodes + stream.src  # one number per source and time
        self._positions = torch.searchsorted(stream.destinations, stream.dst)
        self._order = torch.argsort(self._key, stable=True)
        self._sorted = self._key[self._order]

    def mask(self, lo: int, hi: int) -> Tensor:
        """[hi − lo, N] bool: the destinations that are negatives of the events with numbers lo … hi − 1."""
        key = self._key[lo:hi]
        first = torch.searchsorted(self._sorted, key)
        sizes = torch.searchsorted(self._sorted, key, right=True) - first
        rows = torch.repeat_interleave(torch.arange(hi - lo), sizes)
        within = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
        mask = torch.ones(hi - lo, len(self.destinations), dtype=torch.bool)
        mask[rows, self._positions[self._order[first[rows] + within]]] = False
        return mask
