"""All edges of a graph in destination order, in bounded pieces: what partitioners and counters read.

Node types are numbered through (``Graph.node_offsets``) and the edge types into a node are merged, so a heterogeneous
graph reads like a homogeneous one. A graph opened from a store is read with plain file reads, not
through its memory map, so that the pages of a graph larger than memory do not pile up in the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.store import edge_dir

NumpyArray = np.ndarray[Any, np.dtype[Any]]

# Pointers read at a time: 1 MiB.
_NODES = 1 << 17


@dataclass(frozen=True)
class EdgeSlice:
    """In-edges of consecutive destinations from ``first`` on: those of the k-th are ``src[indptr[k]:indptr[k + 1]]``.

    Whole destinations only: one with more in-edges than the limit comes alone.
    """

    first: int
    indptr: NumpyArray  # int64, starts at 0
    src: NumpyArray  # int32 or int64, numbered through


class _ArrayReader(Protocol):
    def read(self, start: int, stop: int) -> NumpyArray: ...


class _MemoryReader:
    def __init__(self, array: NumpyArray) -> None:
        self._array = array

    def read(self, start: int, stop: int) -> NumpyArray:
        return self._array[start:stop]


class _FileReader:
    def __init__(self, path: Any, offset: int, dtype: np.dtype[Any]) -> None:
        self._path, self._offset, self._dtype = path, offset, dtype

    def read(self, start: int, stop: int) -> NumpyArray:
        return np.fromfile(self._path, self._dtype, stop - start, offset=self._offset + start * self._dtype.itemsize)


class EdgeScan:
    """The edges of a graph, read anew by every call of ``chunks``."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_nodes = graph.num_nodes
        self.num_edges = graph.num_edges
        self._index: type = np.int32 if graph.num_nodes < 2**31 else np.int64

    def chunks(self, limit: int = 1 << 20) -> Iterator[EdgeSlice]:
        """Chunks of at most ``limit`` edges; every node comes once as a destination, in order."""
        for node_type, offset in self.graph.node_offsets.items():
            into = [self._sources(edge_type) for edge_type in self.graph.edges if edge_type.dst == node_type]
            count = self.graph.nodes[node_type].count
            for low in range(0, count, _NODES):
                high = min(low + _NODES, count)
                pointers = [indptr.read(low, high + 1) for indptr, _, _ in into]
                total = sum(pointers, np.zeros(high - low + 1, dtype=np.int64))
                for first, stop in _cut(total, limit):
                    pieces = [
                        (p[first : stop + 1] - p[first], self._numbered(src.read(int(p[first]), int(p[stop])), shift))
                        for p, (_, src, shift) in zip(pointers, into, strict=True)
                    ]
                    yield EdgeSlice(
                        offset + low + first, total[first : stop + 1] - total[first], _merge(pieces, self._index)
                    )

    def _numbered(self, sources: NumpyArray, shift: int) -> NumpyArray:
        numbered: NumpyArray = sources.astype(self._index, copy=False)
        return numbered + self._index(shift) if shift else numbered

    def in_degree(self) -> NumpyArray:
        """[nodes] int64 over all edge types."""
        degree = np.zeros(self.num_nodes, dtype=np.int64)
        offsets = self.graph.node_offsets
        for edge_type, edges in self.graph.edges.items():
            start = offsets[edge_type.dst]
            indptr, _, _ = self._sources(edge_type)
            for low in range(0, edges.num_dst, _NODES):
                high = min(low + _NODES, edges.num_dst)
                degree[start + low : start + high] += np.diff(indptr.read(low, high + 1))
        return degree

    def _sources(self, edge_type: EdgeType) -> tuple[_ArrayReader, _ArrayReader, int]:
        """Pointers and sources of an edge type, and where its source type starts."""
        store, shift = self.graph.store, self.graph.node_offsets[edge_type.src]
        if store is None:
            edges = self.graph.edges[edge_type]
            return _MemoryReader(edges.indptr.numpy()), _MemoryReader(edges.src.numpy()), shift
        indptr, src = (store.array_file(f"{edge_dir(edge_type)}/{name}.npy") for name in ("indptr", "src"))
        return _FileReader(*indptr[:3]), _FileReader(*src[:3]), shift


def _cut(pointers: NumpyArray, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of destinations with at most ``limit`` edges, or a single one."""
    count = len(pointers) - 1
    first = 0
    while first < count:
        stop = int(np.searchsorted(pointers, pointers[first] + limit, side="right")) - 1
        stop = max(stop, first + 1)
        yield first, stop
        first = stop


def _merge(pieces: list[tuple[NumpyArray, NumpyArray]], index: type) -> NumpyArray:
    """Sources of the same destinations from several edge types, ascending for each destination."""
    if len(pieces) == 1:
        return pieces[0][1]
    if not pieces:
        return np.empty(0, index)
    place = np.concatenate([np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) for indptr, _ in pieces])
    source = np.concatenate([src for _, src in pieces])
    if index is np.int32:
        # One sort of packed numbers is several times faster than an indirect one.
        return (np.sort(place << 32 | source) & 0xFFFFFFFF).astype(index)
    merged: NumpyArray = source[np.lexsort((source, place))]
    return merged
