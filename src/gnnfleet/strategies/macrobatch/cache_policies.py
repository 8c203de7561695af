"""Which rows of remote nodes of one type are kept in memory from one macrobatch to the next.

A cache only decides; the rows lie elsewhere, in ``capacity`` slots. A slot holds at most one id, an id has at most one
slot. Only a row that is fetched anyway is ever written, so a cache never adds to what travels. No decision depends on
the number of threads. W ids are wanted in a turn, A of them are admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

CachePolicy = Literal["static", "score", "belady"]


@dataclass(frozen=True, eq=False)
class CacheDecision:
    """What one macrobatch finds in the cache and leaves there; hits are read before anything is written."""

    slots: Tensor  # [W] int64: where each wanted id's row lies before this turn, -1: must be fetched
    admitted: Tensor  # [A] int64: places in ``wanted`` whose fetched rows go into the cache ...
    target_slots: Tensor  # [A] int64: ... and the slots they go into


class RowCache(Protocol):
    """One policy and what it remembers."""

    capacity: int

    def step(self, wanted: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        """The next macrobatch: ``wanted`` [W] int64, ascending distinct ids, none below 0.

        ``future``: the same of the macrobatches that follow, next first, as far as they are known.
        """


def make_cache(policy: CachePolicy, capacity: int, *, foretaste: Sequence[Tensor] = (), **knobs: Any) -> RowCache:
    """An empty cache. ``foretaste``: what macrobatches sampled before training want; belady has no use for it.

    Knobs: ``delta`` and ``alpha`` of score, ``fade`` of belady.
    """
    if policy == "belady":
        return BeladyCache(capacity, **knobs)
    if policy == "score":
        return ScoreCache(capacity, foretaste, **knobs)
    assert policy == "static", policy
    return StaticCache(capacity, foretaste, **knobs)


class StaticCache:
    """The ids that ``foretaste`` wants most often, the lower first among equals; each comes in when first fetched.

    None is ever evicted, and slots beyond the ids of the foretaste stay empty.
    """

    def __init__(self, capacity: int, foretaste: Sequence[Tensor]) -> None:
        self.capacity = capacity
        self._slots = _CacheIndex(capacity, foretaste)

    def step(self, wanted: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        slots = self._slots.find(wanted)
        into = self._slots.fill(slots)
        return CacheDecision(torch.where(into < 0, slots, -1), *_pairs(into))


class ScoreCache:
    """MassiveGNN's rule: rows that were idle give way to rows that were missed (doi 10.1109/CLUSTER59578.2024.00013).

    A row's score fades by ``alpha`` in each turn without use; an id outside counts its misses. In every ``delta``-th
    turn rows that were idle in ``delta`` turns since they came in, lowest score first, give way to the missed ids of
    highest count; a recruit's count becomes its score, a victim's score its count. Empty slots are filled in any turn.
    It starts from ``foretaste`` like static: an id has its slot from the start, its row comes when first fetched.

    Unlike the original: idle turns are counted, not read off the score, so that neither a small alpha nor a high first
    score keeps a row for ever; a recruit is one of the ids missed in this very turn, so that it needs no fetch of its
    own; these misses count; and any remote row may come in, not only halo. Like it, idle turns add up: a use stops the
    count and does not set it back.
    """

    def __init__(self, capacity: int, foretaste: Sequence[Tensor], *, delta: int = 25, alpha: float = 0.05) -> None:
        assert delta >= 1 and 0 <= alpha < 1
        self.capacity, self._delta, self._alpha = capacity, delta, alpha
        self._turns = 0
        self._slots = _CacheIndex(capacity, foretaste)
        self._idle = torch.zeros(capacity, dtype=torch.int64)
        self._score = torch.ones(capacity, dtype=torch.float64)
        # Every id ever missed, also those inside by now, ascending; the counts of these mean nothing until they leave.
        self._missed = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.float64)

    def step(self, wanted: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        self._turns += 1
        slots = self._slots.find(wanted)
        missed = (slots < 0).nonzero()[:, 0]
        self._age(slots[slots >= 0])
        into = self._slots.fill(slots)
        self._begin(into[into >= 0], 1.0)
        slots = torch.where(into < 0, slots, -1)
        self._count(wanted[slots < 0])
        counts = self._counts[_places(self._missed, wanted[missed])]
        room = self._room()
        best = counts.argsort(descending=True, stable=True)[: len(room)]
        recruits, room = missed[best], room[: len(best)]
        self._leave(room)
        self._slots.put(wanted[recruits], room)
        self._begin(room, counts[best])
        into[recruits] = room
        return CacheDecision(slots, *_pairs(into))

    def _age(self, used: Tensor) -> None:
        idle = torch.ones(self.capacity, dtype=torch.bool)
        idle[used] = False
        self._idle += idle
        self._score = torch.where(idle, self._score * (1 - self._alpha), self._score)

    def _room(self) -> Tensor:
        """Slots that missed ids may have in this turn, in this order."""
        empty = self._slots.empty()
        if self._turns % self._delta:
            return empty
        victims = ((self._slots.held >= 0) & (self._idle >= self._delta)).nonzero()[:, 0]
        return torch.cat([empty, victims[self._score[victims].argsort(stable=True)]])

    def _begin(self, slots: Tensor, score: Tensor | float) -> None:
        self._idle[slots] = 0
        self._score[slots] = score

    def _leave(self, slots: Tensor) -> None:
        """Scores of rows that go; an id whose row never came was never missed and is forgotten."""
        gone = slots[self._slots.filled[slots]]
        self._counts[_places(self._missed, self._slots.held[gone])] = self._score[gone]

    def _count(self, ids: Tensor) -> None:
        """One more miss of each of these ids."""
        new = ids[_places(self._missed, ids) < 0]
        at = torch.searchsorted(self._missed, new) + torch.arange(len(new))
        old = torch.ones(len(self._missed) + len(new), dtype=torch.bool)
        old[at] = False
        missed, counts = torch.empty(len(old), dtype=torch.int64), torch.zeros(len(old), dtype=torch.float64)
        missed[at] = new
        missed[old], counts[old] = self._missed, self._counts
        counts[_places(missed, ids)] += 1
        self._missed, self._counts = missed, counts


class BeladyCache:
    """Keeps what is used again soonest, of what it holds and what is wanted now: no rule has more hits.

    Ids of which no use is known come last, the most used first; uses fade by the factor ``fade`` a turn and are
    forgotten when an id leaves. Among equals the rows stay that are there already, then the lower ids.
    """

    def __init__(self, capacity: int, *, fade: float = 0.9) -> None:
        assert 0 <= fade <= 1
        self.capacity, self._fade = capacity, fade
        self._slots = _CacheIndex(capacity)
        self._uses = torch.zeros(capacity, dtype=torch.float64)

    def step(self, wanted: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        slots = self._slots.find(wanted)
        self._uses *= self._fade
        self._uses[slots[slots >= 0]] += 1
        missed = (slots < 0).nonzero()[:, 0]
        held, theirs = self._slots.ids, self._slots.reserved_ids
        ids = torch.cat([held, wanted[missed]])
        uses = torch.cat([self._uses[theirs], torch.ones(len(missed), dtype=torch.float64)])
        kept = self._keep(_next_uses(ids, future, enough=self.capacity), uses, len(future))
        admitted = missed[kept[len(held) :]]
        free = torch.ones(self.capacity, dtype=torch.bool)
        free[theirs[kept[: len(held)]]] = False
        into = free.nonzero()[: len(admitted), 0]
        self._slots.put(wanted[admitted], into)
        self._uses[into] = 1
        return CacheDecision(slots, admitted, into)

    def _keep(self, turns: Tensor, uses: Tensor, never: int) -> Tensor:
        """[n] bool: the ids to keep. ``turns``: when each is used next, ``never`` if no use is known.

        Ids come as equals are to be ranked, so that only those of the last turn for which there is room are sorted.
        """
        if len(turns) <= self.capacity:
            return torch.ones(len(turns), dtype=torch.bool)
        total = torch.bincount(turns, minlength=never + 1).cumsum(0)
        last = int((total < self.capacity).sum())
        kept = turns < last
        rest = (turns == last).nonzero()[:, 0]
        if last == never:
            rest = rest[uses[rest].argsort(descending=True, stable=True)]
        kept[rest[: self.capacity - int(kept.sum())]] = True
        return kept


class _CacheIndex:
    """Which id each slot holds, -1 for none, and the way back; the ids ``foretaste`` wants most often wait for rows."""

    def __init__(self, capacity: int, foretaste: Sequence[Tensor] = ()) -> None:
        assert capacity >= 0
        self.held = torch.full((capacity,), -1, dtype=torch.int64)
        self.filled = torch.zeros(capacity, dtype=torch.bool)
        self.ids = self.reserved_ids = torch.empty(0, dtype=torch.int64)  # ids held, ascending, and their slots
        if foretaste:
            ids, counts = torch.unique(torch.cat(list(foretaste)), return_counts=True)
            chosen = ids[counts.argsort(descending=True, stable=True)[:capacity]]
            self.put(chosen, torch.arange(len(chosen)))
            self.filled[:] = False

    def find(self, ids: Tensor) -> Tensor:
        """[n] the slot of each id, filled or not, or -1."""
        places = _places(self.ids, ids)
        return torch.where(places >= 0, self.reserved_ids[places], -1) if len(self.ids) else places

    def empty(self) -> Tensor:
        return (self.held < 0).nonzero()[:, 0]

    def fill(self, slots: Tensor) -> Tensor:
        """[n] which of these slots were waiting and are filled now, -1 for others."""
        into = torch.full_like(slots, -1)
        known = (slots >= 0).nonzero()[:, 0]
        new = known[~self.filled[slots[known]]]
        into[new] = slots[new]
        self.filled[slots[new]] = True
        return into

    def put(self, ids: Tensor, slots: Tensor) -> None:
        """Rows of these ids go into slots, in place of whatever lay there."""
        if not len(ids):
            return
        self.held[slots] = ids
        self.filled[slots] = True
        full = (self.held >= 0).nonzero()[:, 0]
        self.ids, order = self.held[full].sort()
        self.reserved_ids = full[order]


def _pairs(into: Tensor) -> tuple[Tensor, Tensor]:
    """Places that have a slot to go into, and these slots."""
    admitted = (into >= 0).nonzero()[:, 0]
    return admitted, into[admitted]


def _next_uses(ids: Tensor, future: Sequence[Tensor], *, enough: int) -> Tensor:
    """[n] the first turn that uses each id, or the number of turns. Stops where ``enough`` ids are known to be used."""
    turns = torch.full_like(ids, len(future))
    left = torch.arange(len(ids))
    for turn, wanted in enumerate(future):
        if len(ids) - len(left) >= enough:
            break
        used = _places(wanted, ids[left]) >= 0
        turns[left[used]] = turn
        left = left[~used]
    return turns


def _places(among: Tensor, ids: Tensor) -> Tensor:
    """[n] where each id lies among ascending ones, or -1."""
    if not len(among):
        return torch.full_like(ids, -1)
    at = torch.searchsorted(among, ids).clamp_(max=len(among) - 1)
    return torch.where(among[at] == ids, at, -1)
