"""Order of nodes for pipe: partitions for graph-parallel ranks, and in each partition the chunks of the pipeline.

Nodes of a partition are consecutive, and in it those of a chunk. Partitions have few edges between them (METIS,
balanced by in-edges), and so have the chunks of a partition. One directory stores layouts with several numbers of
partitions, each with the number of rows that its partitions exchange.
N nodes, C chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray, measure_partition
from gnnfleet.graph.partition.shard import check_store_digest, partition_errors
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.report.progress import Progress

KIND = "gnnfleet chunks"


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Partitions of C / ``partitions`` chunks each."""

    order: Tensor  # [N] int64: the store id at each position, or the number across node types
    starts: Tensor  # [C + 1] int64: the first position of each chunk
    partitions: int
    # (sources of in-edges, destinations of out-edges) in another partition, summed over partitions
    halo_rows: tuple[int, int] = (0, 0)

    @property
    def chunks(self) -> int:
        return len(self.starts) - 1

    @property
    def chunks_per_partition(self) -> int:
        return self.chunks // self.partitions

    def partition_range(self, partition: int) -> tuple[int, int]:
        """First position of a partition, and of the next."""
        first = partition * self.chunks_per_partition
        return int(self.starts[first]), int(self.starts[first + self.chunks_per_partition])

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First position of a chunk, and of the next."""
        return int(self.starts[chunk]), int(self.starts[chunk + 1])

    @cached_property
    def position(self) -> Tensor:
        """[N] int64: the position of each store id."""
        position = torch.empty_like(self.order)
        position[self.order] = torch.arange(len(self.order))
        return position

    @cached_property
    def digest(self) -> Tensor:
        """[4] int64: tells layouts with the same number of partitions apart."""
        sha = hashlib.sha256()
        for numbers in (self.order, self.starts):
            sha.update(numbers.contiguous().view(torch.uint8).numpy().data)
        return torch.frombuffer(bytearray(sha.digest()), dtype=torch.int64)


def build_chunk_layout(
    graph: Graph, partitions: int, chunks: int, *, method: str = "mincut", progress: Progress | None = None
) -> ChunkLayout:
    """Partition a graph, then each partition into chunks; several node types are numbered as one."""
    if chunks % partitions:
        raise PartitionError(f"{chunks} chunks cannot be divided evenly among {partitions} partitions")
    per_partition = chunks // partitions
    partition = assign_nodes(graph, partitions, method, balance="edges", progress=progress).part
    chunk = partition * per_partition
    for p in range(partitions if per_partition > 1 else 0):
        members = np.flatnonzero(partition == p)
        if len(members):
            subgraph = _subgraph_with_loops(graph, members)
            chunk[members] += assign_nodes(subgraph, per_partition, method, balance="edges").part
    order = np.argsort(chunk, kind="stable")
    starts = np.zeros(chunks + 1, dtype=np.int64)
    starts[1:] = np.bincount(chunk, minlength=chunks).cumsum()
    halo_rows = _halo_rows(graph, partition, partitions)
    return ChunkLayout(torch.from_numpy(order), torch.from_numpy(starts), partitions, halo_rows)


def _halo_rows(graph: Graph, partition: NumpyArray, partitions: int) -> tuple[int, int]:
    if partitions == 1:
        return 0, 0
    scan, destinations = EdgeScan(graph), 0
    for p in range(partitions):
        is_reached = np.zeros(scan.num_nodes, dtype=bool)
        for edges in scan.slices():
            is_reached[edges.dst()[partition[edges.src] == p]] = True
        destinations += int(np.count_nonzero(is_reached & (partition != p)))
    return measure_partition(graph, partition, partitions).volume, destinations


def _subgraph_with_loops(graph: Graph, nodes: NumpyArray) -> Graph:
    """Induce a subgraph; in-edges from other nodes become self-loops, since they are work of their destination."""
    position = np.full(graph.num_nodes, -1, dtype=np.int64)
    position[nodes] = np.arange(len(nodes))
    pairs = [np.empty((2, 0), np.int64)]
    for edges in EdgeScan(graph).slices():
        src, dst = position[edges.src], position[edges.dst()]
        src, dst = src[dst >= 0], dst[dst >= 0]
        pairs.append(np.stack([np.where(src < 0, dst, src), dst]))
    return Graph(torch.from_numpy(np.concatenate(pairs, axis=1)), num_nodes=len(nodes))


def write_chunk_layouts(graph: Graph, layouts: Sequence[ChunkLayout], path: Path) -> None:
    """Write layouts of one graph; an interrupted write leaves nothing at ``path``."""
    with BundleWriter(path, kind=KIND, overwrite=path.exists()) as out:
        for index, layout in enumerate(layouts):
            out.put(f"order_{index}.npy", layout.order)
            out.put(f"starts_{index}.npy", layout.starts)
        entries = [{"ways": layout.partitions, "mirrored": layout.halo_rows} for layout in layouts]
        out.commit({"layouts": entries, "store": None if graph.store is None else graph.store.digest})


def open_chunk_layouts(path: Path, graph: Graph | None = None) -> list[ChunkLayout]:
    """Open layouts; raises PartitionError if files are damaged or the graph is not the one they were made from."""
    with partition_errors(path):
        bundle = Bundle.open(path, KIND)
        entries = bundle.meta["layouts"]
        if any("mirrored" not in entry for entry in entries):
            raise PartitionError(f"{path} was made by another version of gnnfleet: remove it")
        bundle.verify()
        layouts = [_read_layout(bundle, index, entry) for index, entry in enumerate(entries)]
        check_store_digest(bundle, graph)
    return layouts


def _read_layout(bundle: Bundle, index: int, entry: dict[str, Any]) -> ChunkLayout:
    order, starts = (bundle.tensor(f"{name}_{index}.npy") for name in ("order", "starts"))
    sources, destinations = map(int, entry["mirrored"])
    layout = ChunkLayout(order, starts, entry["ways"], (sources, destinations))
    nodes, chunks = len(order), layout.chunks
    if nodes and not 0 <= int(order.min()) <= int(order.max()) < nodes:
        raise ValueError(f"the order has store ids outside 0 to {nodes - 1}")
    if bool((torch.bincount(order, minlength=nodes) != 1).any()):
        raise ValueError("the order has missing or repeated store ids")
    if int(starts[0]) != 0 or int(starts[-1]) != nodes or bool((starts.diff() < 0).any()):
        raise ValueError(f"the chunks do not cover positions 0 to {nodes - 1} in order")
    if not 1 <= layout.partitions <= chunks or chunks % layout.partitions:
        raise ValueError(f"{chunks} chunks in {layout.partitions} partitions")
    return layout
