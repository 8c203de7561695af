"""Neighbour sampling for one hop and one relation, and the rows that what was sampled gets.

What is drawn for a node depends on the family of draws and its store id alone: not on threads, nor on the other seeds.
S seeds, E edges drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.native import _native, num_threads

# A seed costs about as much as this many multiply-adds; see ``native.num_threads``.
_WORK = 32


@dataclass(frozen=True)
class Fanout:
    """How many in-edges of a node are drawn (−1: all of them), and whether one may be drawn twice."""

    count: int
    replace: bool = False


def sample(
    edges: CSR,
    seeds: Tensor,
    fanout: Fanout,
    *,
    draws: Draws,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(offsets [S + 1], positions [E] of edges, ascending within a seed), both int64; seeds are [S] int64 rows.

    Without replacement every subset of ``count`` edges of a node is as likely as another, and a node with no more edges
    than that gives all. With weights ([edges] float32, not negative) edges are drawn one after the other, in proportion
    to them; an edge of weight 0 is drawn with ``count`` −1 only. ``ids`` ([S] int64) are the seeds' store ids, which
    draws go by, where rows are numbered otherwise: a part of a graph then draws what the whole would.
    """
    key, place = draws.words
    team = num_threads(seeds.shape[0] * _WORK)
    asked = (edges.indptr, weight, seeds, ids, fanout.count, fanout.replace, key, place)
    offsets = torch.empty(seeds.shape[0] + 1, dtype=torch.int64)
    _native.count_samples(*asked, offsets, team)
    found = torch.empty(int(offsets[-1]), dtype=torch.int64)
    _native.draw_samples(*asked, offsets, found, team)
    return offsets, found


def edge_sources(edges: CSR, positions: Tensor) -> Tensor:
    """[E] sources of the edges at some positions ([E] int64)."""
    sources = torch.empty(positions.shape[0], dtype=edges.col.dtype)
    _native.pick(edges.col, positions, sources, num_threads(positions.shape[0] * _WORK))
    return sources


class Frontier:
    """The nodes of one type that a batch reads, each with a row: seeds first, then each hop's new nodes, ascending.

    Memory goes by the nodes of the largest batch, however many there are (``count``, which ids are below). One is made
    for many batches; it serves one thread at a time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._table = _native.Frontier(count)
        self._met: list[tuple[Tensor, Tensor]] = []  # sources and their places in the table
        self.ids = torch.empty(0, dtype=torch.int64)

    def start(self, seeds: Tensor) -> None:
        """Begin a batch; raises InputError for a seed that does not exist or comes twice."""
        self.clear()
        wrong = self._table.start(seeds)
        if wrong >= 0:
            raise InputError(
                f"seeds must be different store ids below {self._count}, found {int(seeds[wrong])} at {wrong}"
            )
        self.ids = seeds

    def add(self, sources: Tensor) -> None:
        """Those of [E] store ids (int32 or int64) that have no row get one in ``assign_rows``. IndexError: no such node."""
        places = torch.empty(sources.shape[0], dtype=torch.int32)
        self._table.meet(sources, places, num_threads(sources.shape[0] * _WORK))
        self._met.append((sources, places))

    def assign_rows(self) -> None:
        """Give rows to the nodes that were met, in ascending order, whoever met them first."""
        before, new = self.ids.shape[0], self._table.grow()
        ids = torch.empty(before + new, dtype=torch.int64)
        ids[:before] = self.ids
        self._table.place(ids[before:])
        self.ids = ids

    def rows(self, sources: Tensor) -> Tensor:
        """[E] int32 the rows of nodes, −1 for one that was not met; ValueError between ``add`` and ``assign_rows``.

        Quickest, once, for the very tensor that was met: where its nodes are was noted, and only becomes rows.
        """
        places = self._places(sources)
        out = torch.empty(sources.shape[0], dtype=torch.int32) if places is None else places
        self._table.rows(sources, places is not None, out, num_threads(sources.shape[0] * _WORK))
        return out

    @property
    def nbytes(self) -> int:
        """What it holds, also after it has forgotten."""
        return int(self._table.bytes)

    def clear(self) -> None:
        """Forget the batch."""
        self._table.clear()
        self._met.clear()
        self.ids = torch.empty(0, dtype=torch.int64)

    def _places(self, sources: Tensor) -> Tensor | None:
        for at, (met, places) in enumerate(self._met):
            if met is sources:
                del self._met[at]
                return places
        return None
