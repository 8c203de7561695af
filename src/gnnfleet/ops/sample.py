"""Neighbour sampling for one hop and one relation, and the rows that what was sampled gets.

What is drawn for a node depends on the family of draws and its store id alone: not on threads, nor on the other seeds.
S seeds, E edges drawn, N nodes of a type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.csr import Compressed
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.native import _native, threads

# A seed costs about as much as this many multiply-adds; see ``native.threads``.
_WORK = 32


@dataclass(frozen=True)
class Fanout:
    """How many in-edges of a node are drawn (−1: all of them), and whether one may be drawn twice."""

    count: int
    replace: bool = False


def sample(
    edges: Compressed, seeds: Tensor, fanout: Fanout, *, draws: Draws, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(offsets [S + 1], positions [E] of edges, ascending within a seed), both int64; seeds are [S] int64 rows.

    Without replacement every subset of ``count`` edges of a node is as likely as another, and a node with no more edges
    than that gives all. With weights ([edges] float32, not negative) edges are drawn one after the other, in proportion
    to them; an edge of weight 0 is drawn with ``count`` −1 only.
    """
    key, place = draws.words
    team = threads(seeds.shape[0] * _WORK)
    asked = (edges.indptr, weight, seeds, fanout.count, fanout.replace, key, place)
    offsets = torch.empty(seeds.shape[0] + 1, dtype=torch.int64)
    _native.count_samples(*asked, offsets, team)
    found = torch.empty(int(offsets[-1]), dtype=torch.int64)
    _native.draw_samples(*asked, offsets, found, team)
    return offsets, found


class Frontier:
    """The nodes of one type that a batch reads, each with a row: seeds first, then each hop's new nodes, ascending.

    Holds two arrays of N entries, so one is made for many batches; it serves one thread at a time.
    """

    def __init__(self, count: int) -> None:
        self._place = torch.full((count,), -1, dtype=torch.int32)
        self._marks = torch.zeros((count + 63) // 64, dtype=torch.uint64)
        self.ids = torch.empty(0, dtype=torch.int64)

    def start(self, seeds: Tensor) -> None:
        """Begin a batch; raises InputError for a seed that does not exist or comes twice."""
        self.clear()
        wrong = _native.enter(seeds, 0, self._place)
        if wrong >= 0:
            raise InputError(
                f"seeds must be different store ids below {len(self._place)}, found {int(seeds[wrong])} at {wrong}"
            )
        self.ids = seeds

    def meet(self, edges: Compressed, positions: Tensor) -> Tensor:
        """[E] sources of the edges at some positions; those without a row get one in ``grow``."""
        sources = torch.empty(positions.shape[0], dtype=edges.col.dtype)
        _native.mark_sources(
            edges.col, positions, self._place, self._marks, sources, threads(positions.shape[0] * _WORK)
        )
        return sources

    def grow(self) -> None:
        """Give rows to the nodes that were met, in ascending order, whoever met them first."""
        before, new = self.ids.shape[0], _native.count_marked(self._marks)
        if not new:
            return
        ids = torch.empty(before + new, dtype=torch.int64)
        ids[:before] = self.ids
        _native.place_marked(self._marks, before, self._place, ids[before:])
        self.ids = ids

    def rows(self, sources: Tensor) -> Tensor:
        """[E] int32 the rows of nodes that have one."""
        out = torch.empty(sources.shape[0], dtype=torch.int32)
        _native.relabel(sources, self._place, out, threads(sources.shape[0] * _WORK))
        return out

    def clear(self) -> None:
        """Forget the batch."""
        _native.leave(self.ids, self._place)
        self._marks.zero_()  # marks are left only where a batch was broken off
        self.ids = torch.empty(0, dtype=torch.int64)
