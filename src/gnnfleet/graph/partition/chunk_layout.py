"""Nodes in chunks that stream one after the other, chunks in ways that work side by side.

A layout puts the nodes of a way next to each other, and in it those of each chunk: a chunk is a span of places. Ways
have few edges between them (METIS, balanced by in-edges), and so have the chunks of a way. Layouts of several numbers
of ways are kept in one directory, with the rows that would travel between the ways of each.
N nodes, C chunks, W ways.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.graph.partition.partition_metrics import measure_partition
from gnnfleet.graph.partition.shard import partition_errors
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.report.progress import NoProgress, Progress

KIND = "gnnfleet chunks"


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """W ways of C / W chunks each."""

    order: Tensor  # [N] int64: the store id at each place
    starts: Tensor  # [C + 1] int64: the first place of each chunk
    partitions: int
    halo_rows: tuple[int, int] = (
        0,
        0,
    )  # (sources, destinations) at an edge of another way than their own, once for each

    @property
    def chunks(self) -> int:
        return len(self.starts) - 1

    @property
    def chunks_per_partition(self) -> int:
        """Chunks of a way."""
        return self.chunks // self.partitions

    def partition_range(self, way: int) -> tuple[int, int]:
        """The places of a way."""
        return int(self.starts[way * self.chunks_per_partition]), int(
            self.starts[(way + 1) * self.chunks_per_partition]
        )

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """The places of a chunk."""
        return int(self.starts[chunk]), int(self.starts[chunk + 1])

    @cached_property
    def position(self) -> Tensor:
        """[N] int64: where each store id lies."""
        found = torch.empty_like(self.order)
        found[self.order] = torch.arange(len(self.order))
        return found

    @cached_property
    def digest(self) -> Tensor:
        """[4] int64: tells it from other layouts of as many ways."""
        found = hashlib.sha256()
        for numbers in (self.order, self.starts):
            found.update(numbers.contiguous().view(torch.uint8).numpy().data)
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.int64)


def build_chunk_layout(
    graph: Graph, ways: int, chunks: int, *, method: str = "mincut", progress: Progress | None = None
) -> ChunkLayout:
    """Cut a graph of one node type; raises PartitionError for several types, or for chunks that ways cannot share."""
    if len(graph.nodes) != 1:
        raise PartitionError(f"chunks are of one node type, found {', '.join(graph.nodes)}")
    if chunks % ways:
        raise PartitionError(f"{ways} ways cannot share {chunks} chunks evenly")
    progress = progress or NoProgress()
    way = assign_nodes(graph, ways, method, balance="edges", progress=progress).part
    chunk = way * (chunks // ways)
    for each in range(ways if chunks > ways else 0):
        inside = np.flatnonzero(way == each)
        if len(inside):
            chunk[inside] += assign_nodes(_induced(graph, inside), chunks // ways, method, balance="edges").part
    order = np.argsort(chunk, kind="stable")
    starts = np.zeros(chunks + 1, dtype=np.int64)
    starts[1:] = np.bincount(chunk, minlength=chunks).cumsum()
    return ChunkLayout(torch.from_numpy(order), torch.from_numpy(starts), ways, _halo_rows(graph, way, ways))


def _halo_rows(graph: Graph, way: NumpyArray, ways: int) -> tuple[int, int]:
    """Rows that other ways mirror: sources of their in-edges, destinations of their out-edges."""
    if ways == 1:
        return 0, 0
    scan, outward = EdgeScan(graph), 0
    for each in range(ways):
        reached = np.zeros(scan.num_nodes, dtype=bool)
        for chunk in scan.chunks():
            dst = np.repeat(np.arange(chunk.first, chunk.first + len(chunk.indptr) - 1), np.diff(chunk.indptr))
            reached[dst[way[chunk.src] == each]] = True
        outward += int(np.count_nonzero(reached & (way != each)))
    return measure_partition(graph, way, ways).volume, outward


def _induced(graph: Graph, nodes: NumpyArray) -> Graph:
    """The subgraph of some nodes as partitioners look at it; in-edges from elsewhere count as work too, as loops."""
    place = np.full(graph.num_nodes, -1, dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    ends = []
    for chunk in EdgeScan(graph).chunks():
        dst = np.repeat(np.arange(chunk.first, chunk.first + len(chunk.indptr) - 1), np.diff(chunk.indptr))
        here = place[dst] >= 0
        dst, src = place[dst[here]], place[chunk.src[here]]
        ends.append(np.stack([np.where(src < 0, dst, src), dst]))
    index = np.concatenate(ends, axis=1) if ends else np.empty((2, 0), np.int64)
    return Graph(torch.from_numpy(index), num_nodes=len(nodes))


def write_chunk_layouts(graph: Graph, layouts: Sequence[ChunkLayout], path: Path) -> None:
    """Keep layouts of one graph, whole or not at all."""
    with BundleWriter(path, kind=KIND, overwrite=path.exists()) as out:
        for number, layout in enumerate(layouts):
            out.put(f"order_{number}.npy", layout.order)
            out.put(f"starts_{number}.npy", layout.starts)
        about = [{"ways": layout.partitions, "mirrored": layout.halo_rows} for layout in layouts]
        out.commit({"layouts": about, "store": None if graph.store is None else graph.store.digest})


def open_chunk_layouts(path: Path, graph: Graph | None = None) -> list[ChunkLayout]:
    """What ``write_chunk_layouts`` kept; raises PartitionError for a damaged file, or one of another graph."""
    with partition_errors(path):
        bundle = Bundle.open(path, KIND)
        about, made_from = bundle.meta["layouts"], bundle.meta["store"]
        if any("mirrored" not in words for words in about):
            raise PartitionError(f"{path} was made by another version of gnnfleet: remove it")
        bundle.verify()
        found = [
            ChunkLayout(
                bundle.tensor(f"order_{number}.npy"),
                bundle.tensor(f"starts_{number}.npy"),
                words["ways"],
                _two(words["mirrored"]),
            )
            for number, words in enumerate(about)
        ]
        for layout in found:
            _check(layout)
    if graph is not None and graph.store is not None and made_from != graph.store.digest:
        raise PartitionError(f"{path} was made from another version of this graph")
    return found


def _two(numbers: list[int]) -> tuple[int, int]:
    one, two = map(int, numbers)
    return one, two


def _check(layout: ChunkLayout) -> None:
    """Raise ValueError unless every node has one place, and chunks follow each other."""
    nodes = len(layout.order)
    if nodes and not 0 <= int(layout.order.min()) <= int(layout.order.max()) < nodes:
        raise ValueError("nodes that are not there")
    if bool((torch.bincount(layout.order, minlength=nodes) != 1).any()):
        raise ValueError("nodes that have no place, or several")
    starts = layout.starts
    if int(starts[0]) != 0 or int(starts[-1]) != len(layout.order) or bool((starts.diff() < 0).any()):
        raise ValueError("chunks that do not follow each other")
    if not 1 <= layout.partitions < len(starts) or (len(starts) - 1) % layout.partitions:
        raise ValueError(f"{layout.partitions} ways of {len(starts) - 1} chunks")
