"""Negative destinations of events, as a function of seed, sweep, event and set: the same for every number of workers.

N destinations, n events, k negatives each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.sampling.negatives import EVALUATION, ONE, TRAINING
from gnnfleet.ops.draws import DrawKey, Draws, Purpose

MAX_REJECTION_COUNT = 49
"""Negatives of an event in evaluations that are not by the full rule."""


@dataclass(frozen=True, eq=False)
class NegativeSampler:
    """Draws destinations other than an event's own, each once, all others as likely."""

    destinations: Tensor  # [N] int64 ascending
    seed: int = 0

    def for_training(self, events: Tensor, positive: Tensor, *, sweep: int, number: int = 0, count: int = 1) -> Tensor:
        """[n, count] for events by their numbers [n] and true destinations [n], in set ``number`` of a sweep."""
        return self._others(
            DrawKey(self.seed, sweep).draws(Purpose.NEGATIVE, TRAINING, number), events, positive, count
        )

    def for_evaluation(self, events: Tensor, positive: Tensor, *, count: int = MAX_REJECTION_COUNT) -> Tensor:
        """[n, count] for validation and test: they depend on the seed and the event only."""
        return self._others(DrawKey(self.seed).draws(Purpose.NEGATIVE, EVALUATION), events, positive, count)

    def one_of(self, events: Tensor, count: int) -> Tensor:
        """[n] column of ``for_evaluation`` to use as the single negative of each event, drawn uniformly."""
        return (DrawKey(self.seed).draws(Purpose.NEGATIVE, ONE).uniforms_at(events)[:, 0] * count).long()

    def _others(self, draws: Draws, events: Tensor, positive: Tensor, count: int) -> Tensor:
        """Floyd's subset of the others' places, then past the positive's own: even as a set, not column by column."""
        if count >= len(self.destinations):
            raise ConfigError(
                f"{count} negatives need {count + 1} destinations, found {len(self.destinations)}: ask for fewer"
            )
        place = torch.searchsorted(self.destinations, positive).clamp_(max=len(self.destinations) - 1)
        place[self.destinations[place] != positive] = len(self.destinations)  # a new node: nothing to leave out
        others = len(self.destinations) - (place < len(self.destinations)).long()
        uniforms = draws.uniforms_at(events, count)
        chosen = torch.empty(len(events), count, dtype=torch.int64)
        for column in range(count):
            last = others - count + column
            pick = (uniforms[:, column] * (last + 1)).long()
            taken = (chosen[:, :column] == pick[:, None]).any(1)
            chosen[:, column] = torch.where(taken, last, pick)
        return self.destinations[chosen + (chosen >= place[:, None])]


class AllDestinations:
    """TGB's full rule: an event is ranked among all destinations but those its source has at the same time."""

    def __init__(self, stream: EventStream) -> None:
        """Of the whole stream: events of one time may lie in several batches."""
        self.destinations = stream.destinations
        moment = torch.zeros(len(stream), dtype=torch.int64)
        moment[1:] = (stream.t[1:] != stream.t[:-1]).cumsum(0)
        self._key = moment * stream.num_nodes + stream.src  # one number per source and time
        self._place = torch.searchsorted(stream.destinations, stream.dst)
        self._order = torch.argsort(self._key, stable=True)
        self._sorted = self._key[self._order]

    def mask(self, lo: int, hi: int) -> Tensor:
        """[hi − lo, N] bool: which destinations are negatives of the events with numbers lo … hi − 1."""
        key = self._key[lo:hi]
        first = torch.searchsorted(self._sorted, key)
        sizes = torch.searchsorted(self._sorted, key, right=True) - first
        rows = torch.repeat_interleave(torch.arange(hi - lo), sizes)
        within = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
        mask = torch.ones(hi - lo, len(self.destinations), dtype=torch.bool)
        mask[rows, self._place[self._order[first[rows] + within]]] = False
        return mask

    def positives(self, lo: int, hi: int) -> Tensor:
        """[hi − lo] places of the true destinations among all."""
        return self._place[lo:hi]
