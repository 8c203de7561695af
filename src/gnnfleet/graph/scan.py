"""All edges of a graph in destination order, in bounded pieces: what partitioners and counters read.

Node types are numbered through (``Graph.node_offsets``), so a heterogeneous graph reads like a homogeneous one; a
destination comes up once per edge type that leads to it. A graph opened from a store is read with plain file reads, not
through its memory map, so that the pages of a graph larger than memory do not pile up in the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.store import edge_folder

Array = np.ndarray[Any, np.dtype[Any]]

# Pointers read at a time: 1 MiB.
_NODES = 1 << 17


@dataclass(frozen=True)
class Chunk:
    """In-edges of consecutive destinations from ``first`` on: those of the k-th are ``src[indptr[k]:indptr[k + 1]]``.

    Whole destinations only, except that one with more in-edges than the limit comes alone, in several chunks.
    """

    first: int
    indptr: Array  # int64, starts at 0
    src: Array  # int32 or int64, numbered through


class _Source(Protocol):
    def read(self, start: int, stop: int) -> Array: ...


class _InMemory:
    def __init__(self, array: Array) -> None:
        self._array = array

    def read(self, start: int, stop: int) -> Array:
        return self._array[start:stop]


class _OnDisk:
    def __init__(self, path: Any, offset: int, dtype: np.dtype[Any]) -> None:
        self._path, self._offset, self._dtype = path, offset, dtype

    def read(self, start: int, stop: int) -> Array:
        return np.fromfile(self._path, self._dtype, stop - start, offset=self._offset + start * self._dtype.itemsize)


class EdgeScan:
    """The edges of a graph, read anew by every call of ``chunks``."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_nodes = graph.num_nodes
        self.num_edges = graph.num_edges
        self._index: type = np.int32 if graph.num_nodes < 2**31 else np.int64

    def chunks(self, limit: int = 1 << 20) -> Iterator[Chunk]:
        """Chunks of at most ``limit`` edges."""
        offsets = self.graph.node_offsets
        for edge_type, edges in self.graph.edges.items():
            indptr, src = self._sources(edge_type)
            num_dst = edges.num_dst
            for low in range(0, num_dst, _NODES):
                pointers = indptr.read(low, min(low + _NODES, num_dst) + 1)
                for chunk in _cut(pointers, src, limit):
                    shift = offsets[edge_type.src]
                    sources: Array = chunk.src.astype(self._index, copy=False)
                    yield Chunk(
                        offsets[edge_type.dst] + low + chunk.first,
                        chunk.indptr,
                        sources + self._index(shift) if shift else sources,
                    )

    def in_degree(self) -> Array:
        """[nodes] int64 over all edge types."""
        degree = np.zeros(self.num_nodes, dtype=np.int64)
        offsets = self.graph.node_offsets
        for edge_type, edges in self.graph.edges.items():
            start = offsets[edge_type.dst]
            indptr, _ = self._sources(edge_type)
            for low in range(0, edges.num_dst, _NODES):
                high = min(low + _NODES, edges.num_dst)
                degree[start + low : start + high] += np.diff(indptr.read(low, high + 1))
        return degree

    def _sources(self, edge_type: EdgeType) -> tuple[_Source, _Source]:
        store = self.graph.store
        if store is None:
            edges = self.graph.edges[edge_type]
            return _InMemory(edges.indptr.numpy()), _InMemory(edges.src.numpy())
        indptr, src = (store.array_file(f"{edge_folder(edge_type)}/{name}.npy") for name in ("indptr", "src"))
        return _OnDisk(*indptr[:3]), _OnDisk(*src[:3])


def _cut(pointers: Array, src: _Source, limit: int) -> Iterator[Chunk]:
    """Chunks of the destinations whose pointers were read."""
    count = len(pointers) - 1
    k = 0
    while k < count:
        stop = int(np.searchsorted(pointers, pointers[k] + limit, side="right")) - 1
        if stop > k:
            start = pointers[k]
            yield Chunk(k, pointers[k : stop + 1] - start, src.read(int(start), int(pointers[stop])))
            k = stop
            continue
        for start in range(int(pointers[k]), int(pointers[k + 1]), limit):
            end = min(start + limit, int(pointers[k + 1]))
            yield Chunk(k, np.array([0, end - start], dtype=np.int64), src.read(start, end))
        k += 1
