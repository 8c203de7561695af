"""All edges of a graph in destination order, in slices of bounded size, for partitioners and metrics.

Node types are numbered consecutively (``Graph.node_offsets``), and the edge types into a node are merged: a
heterogeneous graph reads like a homogeneous one. The arrays of a store are read with file reads, not through its
memory map: the pages of a graph larger than memory would accumulate in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gnnfleet.graph.graph import TRAIN, EdgeType, Graph
from gnnfleet.graph.store import edge_dir
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import Progress

NumpyArray = np.ndarray[Any, np.dtype[Any]]

_ReadRange = Callable[[int, int], NumpyArray]
"""Reads elements start to stop of an array."""

_POINTERS_PER_READ = 1 << 17  # 1 MiB


class EdgeSlice(NamedTuple):
    """In-edges of consecutive destinations from ``first`` on: those of the k-th are ``src[indptr[k]:indptr[k + 1]]``.

    A destination is never split: one with more in-edges than the limit has a slice to itself.
    """

    first: int
    indptr: NumpyArray  # int64, starts at 0
    src: NumpyArray  # int32 or int64, numbered across node types

    def dst(self) -> NumpyArray:
        """[E] the destination of each edge."""
        nodes = np.arange(self.first, self.first + len(self.indptr) - 1, dtype=self.src.dtype)
        return np.repeat(nodes, np.diff(self.indptr))


class EdgeScan:
    """The edges of a graph, read again by every call of ``slices``; ``advance`` takes the number of edges read."""

    def __init__(self, graph: Graph, advance: Callable[[int], None] = lambda _: None) -> None:
        self.graph, self._advance = graph, advance
        self.num_nodes = graph.num_nodes
        self.num_edges = graph.num_edges
        self._index: type = np.int32 if graph.num_nodes < 2**31 else np.int64

    def slices(self, limit: int = 1 << 20) -> Iterator[EdgeSlice]:
        """Slices of at most ``limit`` edges; every node is a destination exactly once, in order."""
        for node_type, offset in self.graph.node_offsets.items():
            arrays = [self._open(edge_type) for edge_type in self.graph.edges if edge_type.dst == node_type]
            count = self.graph.nodes[node_type].count
            for low in range(0, count, _POINTERS_PER_READ):
                high = min(low + _POINTERS_PER_READ, count)
                pointers = [read_indptr(low, high + 1) for read_indptr, _, _ in arrays]
                total = sum(pointers, np.zeros(high - low + 1, dtype=np.int64))
                for first, stop in _destination_ranges(total, limit):
                    by_type = [
                        (p[first : stop + 1] - p[first], self._shift(read_src(int(p[first]), int(p[stop])), shift))
                        for p, (_, read_src, shift) in zip(pointers, arrays, strict=True)
                    ]
                    indptr = total[first : stop + 1] - total[first]
                    yield EdgeSlice(offset + low + first, indptr, _merge(by_type, self._index))
                    self._advance(int(indptr[-1]))

    def in_degree(self) -> NumpyArray:
        """[nodes] int64 over all edge types."""
        degree = np.zeros(self.num_nodes, dtype=np.int64)
        for edge_type, edges in self.graph.edges.items():
            offset = self.graph.node_offsets[edge_type.dst]
            read_indptr, _, _ = self._open(edge_type)
            for low in range(0, edges.num_dst, _POINTERS_PER_READ):
                high = min(low + _POINTERS_PER_READ, edges.num_dst)
                degree[offset + low : offset + high] += np.diff(read_indptr(low, high + 1))
        return degree

    def _open(self, edge_type: EdgeType) -> tuple[_ReadRange, _ReadRange, int]:
        """(indptr of an edge type, its sources, the number of its first source node)."""
        store, shift = self.graph.store, self.graph.node_offsets[edge_type.src]
        if store is None:
            edges = self.graph.edges[edge_type]
            return _memory_reader(edges.indptr.numpy()), _memory_reader(edges.src.numpy()), shift
        indptr, src = (store.array_file(f"{edge_dir(edge_type)}/{name}.npy") for name in ("indptr", "src"))
        return _file_reader(*indptr), _file_reader(*src), shift

    def _shift(self, sources: NumpyArray, shift: int) -> NumpyArray:
        numbered: NumpyArray = sources.astype(self._index, copy=False)
        return numbered + self._index(shift) if shift else numbered


def _memory_reader(array: NumpyArray) -> _ReadRange:
    return lambda start, stop: array[start:stop]


def _file_reader(path: Path, offset: int, dtype: np.dtype[Any]) -> _ReadRange:
    return lambda start, stop: np.fromfile(path, dtype, stop - start, offset=offset + start * dtype.itemsize)


def _destination_ranges(pointers: NumpyArray, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of destinations with at most ``limit`` edges, or of a single destination."""
    count = len(pointers) - 1
    first = 0
    while first < count:
        stop = int(np.searchsorted(pointers, pointers[first] + limit, side="right")) - 1
        stop = max(stop, first + 1)
        yield first, stop
        first = stop


def _merge(by_type: list[tuple[NumpyArray, NumpyArray]], index: type) -> NumpyArray:
    """Merge (indptr, sources) of several edge types into the same destinations; sources ascend per destination."""
    if len(by_type) == 1:
        return by_type[0][1]
    if not by_type:
        return np.empty(0, index)
    row = np.concatenate([np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)) for indptr, _ in by_type])
    source = np.concatenate([src for _, src in by_type])
    if index is np.int32:
        # One sort of packed numbers is several times faster than an indirect sort.
        return (np.sort(row << 32 | source) & 0xFFFFFFFF).astype(index)
    merged: NumpyArray = source[np.lexsort((source, row))]
    return merged


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """Number of parts, and how to balance and search."""

    parts: int
    weights: NumpyArray  # [nodes] balanced over the parts, never all zero
    seed: int = 0
    imbalance: float = 0.03  # heaviest part over the mean, minus one: METIS's own default
    clusters: int | None = None  # super: number of mini-clusters
    tries: int = 5  # mincut: number of seeds; the smallest cut is used


@dataclass(frozen=True, kw_only=True)
class PartitionMetrics:
    """Metrics of an assignment to P parts."""

    num_nodes: int
    nodes: NumpyArray  # [P]
    train: NumpyArray  # [P] training nodes of the first split
    edges: NumpyArray  # [P, P] edges from part q into part p
    halo_rows: NumpyArray  # [P, P] distinct rows part p needs from part q; 0 on the diagonal

    @property
    def kept_edges(self) -> int:
        return int(np.trace(self.edges))

    @property
    def cut_edges(self) -> int:
        return int(self.edges.sum()) - self.kept_edges

    @property
    def volume(self) -> int:
        """Σ(λ − 1): rows sent per layer, over all parts."""
        return int(self.halo_rows.sum())

    @property
    def replication(self) -> float:
        """Mean number of parts that hold a node, as its owner or in their halo."""
        return 1.0 + self.volume / self.num_nodes if self.num_nodes else 1.0

    def summary(self) -> dict[str, Any]:
        """All metrics as plain numbers; bytes are of float32 rows in the forward pass of one layer."""
        total = int(self.edges.sum())
        edges, halo = self.edges.sum(axis=1), self.halo_rows.sum(axis=1)
        max_halo = int(halo.max(initial=0))
        return {
            "parts": len(self.nodes),
            "num_nodes": self.num_nodes,
            "num_edges": total,
            "kept_edges": self.kept_edges,
            "kept_share": self.kept_edges / total if total else 1.0,
            "cut_edges": self.cut_edges,
            "volume": self.volume,
            "volume_max_part": max_halo,
            "replication": self.replication,
            "balance": {"nodes": imbalance(self.nodes), "edges": imbalance(edges), "train": imbalance(self.train)},
            "per_part": {
                "nodes": self.nodes.tolist(),
                "train": self.train.tolist(),
                "edges": edges.tolist(),
                "halo": halo.tolist(),
            },
            "need": self.halo_rows.tolist(),
            "bytes_per_layer": {
                str(width): {"total": 4 * width * self.volume, "max_part": 4 * width * max_halo}
                for width in (64, 128, 256)
            },
        }


def measure_partition(
    graph: Graph, part: NumpyArray, parts: int, *, progress: Progress | None = None
) -> PartitionMetrics:
    """Measure an assignment ([nodes] int32), in one pass over the edges per 64 parts."""
    advance = (progress or Progress()).stage("count", graph.num_edges * -(-parts // 64))
    scan = EdgeScan(graph, advance)
    edges = np.zeros((parts, parts), dtype=np.int64)
    halo_rows = np.zeros((parts, parts), dtype=np.int64)
    for base in range(0, parts, 64):
        reached_parts = np.zeros(scan.num_nodes, dtype=np.uint64)  # one bit per part
        for edge_slice in scan.slices():
            _native.count_traffic(*edge_slice, part, base, reached_parts, edges, halo_rows)
    return PartitionMetrics(
        num_nodes=scan.num_nodes,
        nodes=np.bincount(part, minlength=parts),
        train=np.bincount(part[train_mask(graph)], minlength=parts),
        edges=edges,
        halo_rows=halo_rows,
    )


def train_mask(graph: Graph) -> NumpyArray:
    """[nodes] bool, numbered across node types: training nodes of the first split."""
    mask = np.zeros(graph.num_nodes, dtype=bool)
    for node_type, start in graph.node_offsets.items():
        nodes = graph.nodes[node_type]
        if nodes.split is not None:
            mask[start : start + nodes.count] = (nodes.split[0] == TRAIN).numpy()
    return mask


def imbalance(load: NumpyArray) -> float:
    """Heaviest part over the mean; 1 if all parts are empty."""
    return float(load.max() * len(load) / load.sum()) if load.sum() else 1.0
