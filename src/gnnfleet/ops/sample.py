"""Neighbour sampling for one hop and one relation, and the rows of sampled nodes.

The edges drawn for a node depend on the draws and its store id only: not on threads, nor on the other seeds.
S seeds, E drawn edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws
from gnnfleet.ops.native import _native, num_threads

# Cost of a seed in multiply-adds; see ``native.num_threads``.
_WORK = 32


@dataclass(frozen=True)
class Fanout:
    """Number of in-edges drawn per node (−1: all), with or without replacement."""

    count: int
    replace: bool = False


def sample(
    edges: CSR, seeds: Tensor, fanout: Fanout, *, draws: Draws, weight: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(offsets [S + 1], positions [E] of edges, ascending within a seed), both int64; seeds are [S] int64 rows.

    Without replacement every subset of ``count`` edges of a node is equally likely, and a node with at most ``count``
    edges gives all. With weights ([edges] float32, not negative) edges are drawn successively, in proportion to them;
    an edge of weight 0 is drawn only if ``count`` is −1. ``ids`` ([S] int64) are the store ids of the seeds, which key
    the draws, if rows are not store ids: a part of a graph then draws the same as the whole.
    """
    key, stream = draws.kernel_args
    threads = num_threads(seeds.shape[0] * _WORK)
    query = (edges.indptr, weight, seeds, ids, fanout.count, fanout.replace, key, stream)
    offsets = torch.empty(seeds.shape[0] + 1, dtype=torch.int64)
    _native.count_samples(*query, offsets, threads)
    positions = torch.empty(int(offsets[-1]), dtype=torch.int64)
    _native.draw_samples(*query, offsets, positions, threads)
    return offsets, positions


def edge_sources(edges: CSR, positions: Tensor) -> Tensor:
    """[E] sources of the edges at some positions ([E] int64)."""
    sources = torch.empty(positions.shape[0], dtype=edges.col.dtype)
    _native.pick(edges.col, positions, sources, num_threads(positions.shape[0] * _WORK))
    return sources


class Frontier:
    """Rows of the nodes of one type that a batch reads: seeds first, then the new nodes of each hop, ascending.

    Memory is proportional to the largest batch, not to ``count``, the number of nodes. An instance serves many
    batches, and one thread at a time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._table = _native.Frontier(count)
        self._added: list[tuple[Tensor, Tensor]] = []  # sources and their positions in the table
        self.ids = torch.empty(0, dtype=torch.int64)

    def start(self, seeds: Tensor) -> None:
        """Begin a batch; raises InputError for a missing or repeated seed."""
        self.clear()
        wrong = self._table.start(seeds)
        if wrong >= 0:
            raise InputError(
                f"seeds must be different store ids below {self._count}, found {int(seeds[wrong])} at {wrong}"
            )
        self.ids = seeds

    def add(self, sources: Tensor) -> None:
        """Register [E] store ids (int32 or int64) for ``assign_rows``; raises IndexError for a missing node."""
        places = torch.empty(sources.shape[0], dtype=torch.int32)
        self._table.meet(sources, places, num_threads(sources.shape[0] * _WORK))
        self._added.append((sources, places))

    def assign_rows(self) -> None:
        """Assign rows to the registered nodes without one, in ascending order."""
        before, new = self.ids.shape[0], self._table.grow()
        ids = torch.empty(before + new, dtype=torch.int64)
        ids[:before] = self.ids
        self._table.place(ids[before:])
        self.ids = ids

    def rows(self, sources: Tensor) -> Tensor:
        """[E] int32 rows of nodes, −1 for unknown ones; ValueError between ``add`` and ``assign_rows``.

        Fastest, once, for a tensor object that was passed to ``add``: its table positions are cached.
        """
        places = self._places(sources)
        out = torch.empty(sources.shape[0], dtype=torch.int32) if places is None else places
        self._table.rows(sources, places is not None, out, num_threads(sources.shape[0] * _WORK))
        return out

    @property
    def nbytes(self) -> int:
        """Allocated bytes, also after ``clear``."""
        return int(self._table.bytes)

    def clear(self) -> None:
        self._table.clear()
        self._added.clear()
        self.ids = torch.empty(0, dtype=torch.int64)

    def _places(self, sources: Tensor) -> Tensor | None:
        for index, (added, places) in enumerate(self._added):
            if added is sources:
                del self._added[index]
                return places
        return None
