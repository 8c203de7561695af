"""Policies of the row cache: which remote rows of one node type stay in memory from one macrobatch to the next.

A policy only decides; the rows are stored elsewhere, in ``capacity`` slots. A slot holds at most one id, an id has at
most one slot. Only rows that are fetched anyway are written, so a cache never adds traffic. No decision depends on the
number of threads. Of W requested ids, A are admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.strategies.macrobatch.config import CachePolicy


@dataclass(frozen=True, eq=False)
class CacheDecision:
    """Hits and admissions of one macrobatch; hits are read before anything is written."""

    slots: Tensor  # [W] int64: the slot of each requested id's row before this step, -1 for a miss
    admitted: Tensor  # [A] int64: positions in ``requested`` of the fetched rows that enter the cache ...
    target_slots: Tensor  # [A] int64: ... and the slots they are written to


def make_cache(policy: CachePolicy, capacity: int, *, warmup: Sequence[Tensor] = (), **parameters: Any) -> RowCache:
    """An empty cache. ``warmup``: requests of macrobatches sampled before training; belady ignores them.

    Parameters: ``delta`` and ``alpha`` of score, ``fade`` of belady.
    """
    if policy == "belady":
        return BeladyCache(capacity, **parameters)
    assert policy == "score", policy
    return ScoreCache(capacity, warmup, **parameters)


class ScoreCache:
    """MassiveGNN's rule: idle rows are replaced by rows that were missed (doi 10.1109/CLUSTER59578.2024.00013).

    A row's score fades by ``alpha`` in each step without use; an id outside counts its misses. In every ``delta``-th
    step, rows that were idle in ``delta`` steps since they entered are evicted, lowest score first, for the missed ids
    of highest count. An admitted id's count becomes its score, an evicted id's score its count. Empty slots are filled
    in any step. The ids that ``warmup`` requests most often have slots from the start, the lower first among equals;
    their rows enter when first fetched.

    Unlike the original: idle steps are counted, not read off the score, so that neither a small alpha nor a high first
    score keeps a row for ever; an admitted id is one of those missed in this very step, so that it needs no fetch of
    its own; these misses count; and any remote row may enter, not only halo. Like it, idle steps add up: a use stops
    the count and does not reset it.
    """

    def __init__(self, capacity: int, warmup: Sequence[Tensor], *, delta: int = 25, alpha: float = 0.05) -> None:
        assert delta >= 1 and 0 <= alpha < 1
        self.capacity, self._delta, self._alpha = capacity, delta, alpha
        self._steps = 0
        self._index = _CacheIndex(capacity, warmup)
        self._idle = torch.zeros(capacity, dtype=torch.int64)
        self._score = torch.ones(capacity, dtype=torch.float64)
        # Every id ever missed, ascending. The counts of ids that are cached now mean nothing until they are evicted.
        self._missed = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.float64)

    def step(self, requested: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        """Decide for the next macrobatch: ``requested`` [W] int64, distinct ids of 0 or more, ascending.

        ``future`` has the requests of the macrobatches that follow, next first, as far as they are sampled.
        """
        self._steps += 1
        slots = self._index.find(requested)
        missed = (slots < 0).nonzero()[:, 0]
        self._age(slots[slots >= 0])
        target_slots = self._index.fill(slots)
        self._reset(target_slots[target_slots >= 0], 1.0)
        slots = torch.where(target_slots < 0, slots, -1)
        self._count_misses(requested[slots < 0])
        counts = self._counts[_positions(self._missed, requested[missed])]
        free = self._free_slots()
        most_missed = counts.argsort(descending=True, stable=True)[: len(free)]
        admitted, free = missed[most_missed], free[: len(most_missed)]
        self._evict(free)
        self._index.put(requested[admitted], free)
        self._reset(free, counts[most_missed])
        target_slots[admitted] = free
        entered = (target_slots >= 0).nonzero()[:, 0]
        return CacheDecision(slots, entered, target_slots[entered])

    def _age(self, used: Tensor) -> None:
        idle = torch.ones(self.capacity, dtype=torch.bool)
        idle[used] = False
        self._idle += idle
        self._score = torch.where(idle, self._score * (1 - self._alpha), self._score)

    def _free_slots(self) -> Tensor:
        """Slots that missed ids may take in this step, in this order."""
        empty = (self._index.held < 0).nonzero()[:, 0]
        if self._steps % self._delta:
            return empty
        victims = ((self._index.held >= 0) & (self._idle >= self._delta)).nonzero()[:, 0]
        return torch.cat([empty, victims[self._score[victims].argsort(stable=True)]])

    def _reset(self, slots: Tensor, score: Tensor | float) -> None:
        self._idle[slots] = 0
        self._score[slots] = score

    def _evict(self, slots: Tensor) -> None:
        """Turn scores of evicted rows into counts; an id whose row never entered has no count and is forgotten."""
        evicted = slots[self._index.filled[slots]]
        self._counts[_positions(self._missed, self._index.held[evicted])] = self._score[evicted]

    def _count_misses(self, ids: Tensor) -> None:
        new = ids[_positions(self._missed, ids) < 0]
        new_at = torch.searchsorted(self._missed, new) + torch.arange(len(new))
        is_old = torch.ones(len(self._missed) + len(new), dtype=torch.bool)
        is_old[new_at] = False
        missed, counts = torch.empty(len(is_old), dtype=torch.int64), torch.zeros(len(is_old), dtype=torch.float64)
        missed[new_at] = new
        missed[is_old], counts[is_old] = self._missed, self._counts
        counts[_positions(missed, ids)] += 1
        self._missed, self._counts = missed, counts


class BeladyCache:
    """Keeps the rows that are used again soonest, of those it holds and those requested now: the optimal policy.

    Ids without a known use come last, the most used first. Uses fade by the factor ``fade`` a step and are forgotten
    when an id is evicted. Among equals, cached rows stay, then the lower ids enter.
    """

    def __init__(self, capacity: int, *, fade: float = 0.9) -> None:
        assert 0 <= fade <= 1
        self.capacity, self._fade = capacity, fade
        self._index = _CacheIndex(capacity)
        self._uses = torch.zeros(capacity, dtype=torch.float64)

    def step(self, requested: Tensor, future: Sequence[Tensor] = ()) -> CacheDecision:
        slots = self._index.find(requested)
        self._uses *= self._fade
        self._uses[slots[slots >= 0]] += 1
        missed = (slots < 0).nonzero()[:, 0]
        cached_ids, cached_slots = self._index.ids, self._index.slots
        ids = torch.cat([cached_ids, requested[missed]])
        uses = torch.cat([self._uses[cached_slots], torch.ones(len(missed), dtype=torch.float64)])
        keep = self._choose(_next_uses(ids, future, enough=self.capacity), uses, len(future))
        admitted = missed[keep[len(cached_ids) :]]
        is_free = torch.ones(self.capacity, dtype=torch.bool)
        is_free[cached_slots[keep[: len(cached_ids)]]] = False
        target_slots = is_free.nonzero()[: len(admitted), 0]
        self._index.put(requested[admitted], target_slots)
        self._uses[target_slots] = 1
        return CacheDecision(slots, admitted, target_slots)

    def _choose(self, next_use: Tensor, uses: Tensor, never: int) -> Tensor:
        """[n] bool: the ids to keep. ``next_use`` is ``never`` if no use is known.

        Ids come in the order in which equals are ranked, so only those of the last step with room are sorted.
        """
        if len(next_use) <= self.capacity:
            return torch.ones(len(next_use), dtype=torch.bool)
        total = torch.bincount(next_use, minlength=never + 1).cumsum(0)
        last = int((total < self.capacity).sum())
        keep = next_use < last
        tied = (next_use == last).nonzero()[:, 0]
        if last == never:
            tied = tied[uses[tied].argsort(descending=True, stable=True)]
        keep[tied[: self.capacity - int(keep.sum())]] = True
        return keep


RowCache = ScoreCache | BeladyCache


class _CacheIndex:
    """The id of each slot (-1: none) and the slot of each id. The ids most requested by ``warmup`` have empty slots."""

    def __init__(self, capacity: int, warmup: Sequence[Tensor] = ()) -> None:
        assert capacity >= 0
        self.held = torch.full((capacity,), -1, dtype=torch.int64)
        self.filled = torch.zeros(capacity, dtype=torch.bool)
        self.ids = self.slots = torch.empty(0, dtype=torch.int64)  # ids held, ascending, and their slots
        if warmup:
            ids, counts = torch.unique(torch.cat(list(warmup)), return_counts=True)
            chosen = ids[counts.argsort(descending=True, stable=True)[:capacity]]
            self.put(chosen, torch.arange(len(chosen)))
            self.filled[:] = False

    def find(self, ids: Tensor) -> Tensor:
        """[n] the slot of each id, filled or not, or -1."""
        positions = _positions(self.ids, ids)
        return torch.where(positions >= 0, self.slots[positions], -1) if len(self.ids) else positions

    def fill(self, slots: Tensor) -> Tensor:
        """Fill those of ``slots`` that have an id and no row yet. [n] the slots filled now, -1 for others."""
        filled_now = torch.full_like(slots, -1)
        present = (slots >= 0).nonzero()[:, 0]
        new = present[~self.filled[slots[present]]]
        filled_now[new] = slots[new]
        self.filled[slots[new]] = True
        return filled_now

    def put(self, ids: Tensor, slots: Tensor) -> None:
        """Assign slots to ids, in place of any ids that had them."""
        if not len(ids):
            return
        self.held[slots] = ids
        self.filled[slots] = True
        used = (self.held >= 0).nonzero()[:, 0]
        self.ids, order = self.held[used].sort()
        self.slots = used[order]


def _next_uses(ids: Tensor, future: Sequence[Tensor], *, enough: int) -> Tensor:
    """[n] the first step that uses each id, or the number of steps. Stops once ``enough`` ids have a known use."""
    next_use = torch.full_like(ids, len(future))
    unused = torch.arange(len(ids))
    for step, requested in enumerate(future):
        if len(ids) - len(unused) >= enough:
            break
        used = _positions(requested, ids[unused]) >= 0
        next_use[unused[used]] = step
        unused = unused[~used]
    return next_use


def _positions(ascending: Tensor, ids: Tensor) -> Tensor:
    """[n] the position of each id among ascending ones, or -1."""
    if not len(ascending):
        return torch.full_like(ids, -1)
    positions = torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)
    return torch.where(ascending[positions] == ids, positions, -1)
