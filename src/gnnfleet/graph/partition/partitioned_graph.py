"""A partitioned graph on disk: one directory per part (``Shard``), the assignment and its metrics.

Parts are written one at a time, in memory for a few numbers per node and the edges of one part. First the in-edges of
every part are grouped by the part of their source. The block q → p is then transposed to the out-edges of q, so the
whole graph is never transposed.
P parts, T edge types.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray, PartitionMetrics, measure_partition
from gnnfleet.graph.partition.shard import KIND as PART
from gnnfleet.graph.partition.shard import Shard, check_store_digest, edge_data_path, halo_plan_dir, partition_errors
from gnnfleet.graph.reorder import cluster_positions
from gnnfleet.graph.store import node_dir
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.ops import csr
from gnnfleet.ops.gather import gather
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import Progress

KIND = "partition"


class Partition:
    """A partition opened for reading."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.parts: int = bundle.meta["parts"]
        self.summary: dict[str, Any] = bundle.meta["quality"]

    @classmethod
    def open(cls, path: str | Path, graph: Graph | None = None) -> Partition:
        """Open every part; raises PartitionError if one is damaged or ``graph`` is from another store."""
        with partition_errors(path):
            partition = cls(Bundle.open(path, KIND))
            for part in range(partition.parts):
                partition.shard(part)
            check_store_digest(partition.bundle, graph)
        return partition

    def shard(self, part: int) -> Shard:
        """Open one part; raises PartitionError if it was written with another partition."""
        with partition_errors(self.bundle.path):
            shard = Shard.open(self.bundle.path / part_dir(part))
            digest = self.bundle.meta["part_digests"][part]
        if shard.bundle.digest != digest:
            raise PartitionError(f"{shard.bundle.path} belongs to another partition: partition the graph again")
        return shard

    def part_bundles(self) -> list[Bundle]:
        """The bundles of the partition and of all its parts."""
        return [self.bundle, *(self.shard(part).bundle for part in range(self.parts))]

    def assignment(self) -> Tensor:
        """[nodes] int32: the part of every node, numbered across node types."""
        with partition_errors(self.bundle.path):
            self.bundle.verify(names=["assignment.npy"])
            return self.bundle.tensor("assignment.npy")


def assignment_of(shard: Shard) -> Tensor:
    """``Partition.assignment`` from the directory above a part; raises PartitionError if only the part was copied."""
    with partition_errors(shard.bundle.path.parent):
        return Partition(Bundle.open(shard.bundle.path.parent, KIND)).assignment()


def open_part(path: str | Path, part: int) -> Shard:
    """Open one part of a partition whose other parts may be missing; raises PartitionError."""
    with partition_errors(path):
        return Partition(Bundle.open(path, KIND)).shard(part)


def write_partition(
    graph: Graph,
    assignment: Assignment,
    path: str | Path,
    *,
    overwrite: bool = False,
    metrics: PartitionMetrics | None = None,
    progress: Progress | None = None,
) -> Partition:
    """Write the parts of an assignment; an interrupted write leaves nothing at ``path``."""
    progress = progress or Progress()
    parts = assignment.parts
    metrics = metrics or measure_partition(graph, assignment.part, parts, progress=progress)
    progress.stage("order")
    placements = _place_nodes(graph, assignment)
    with BundleWriter(path, kind=KIND, overwrite=overwrite) as out, ExitStack() as stack:
        writers = [stack.enter_context(BundleWriter(out.path / part_dir(p), kind=PART)) for p in range(parts)]
        shards = _ShardWriter(graph, placements, writers)
        advance = progress.stage("in-edges", parts)
        for part in range(parts):
            shards.write_nodes(part)
            shards.write_in_edges(part)
            advance(1)
        advance = progress.stage("out-edges", parts)
        for part in range(parts):
            shards.write_out_edges(part)
            advance(1)
        for part, writer in enumerate(writers):
            edge_types = [list(edge_type) for edge_type in graph.edges]
            writer.commit({"part": part, "parts": parts, "node_types": list(graph.nodes), "edge_types": edge_types})
        out.put("assignment.npy", torch.from_numpy(assignment.part))
        out.commit(
            {
                "parts": parts,
                "method": assignment.method,
                "balance": assignment.balance,
                "seed": assignment.seed,
                "store": graph.store.digest if graph.store else None,
                "part_digests": [Bundle.open(writer.target, PART).digest for writer in writers],
                "quality": metrics.summary(),
            }
        )
    return Partition.open(path)


def part_dir(part: int) -> str:
    return f"part-{part:05d}"


@dataclass(frozen=True)
class _Placement:
    """The part and the row of every node of one type."""

    owner: NumpyArray  # [n] int32: the part
    row: NumpyArray  # [n] int32: the row in that part
    members: tuple[NumpyArray, ...]  # P lists of store ids by row, int64


def _place_nodes(graph: Graph, assignment: Assignment) -> dict[str, _Placement]:
    """Number the nodes of every type within their parts, neighbours close together."""
    position = cluster_positions(EdgeScan(graph), seed=assignment.seed)
    placements = {}
    for node_type, start in graph.node_offsets.items():
        span = slice(start, start + graph.nodes[node_type].count)
        part = assignment.part[span]
        order = np.argsort(position[span])
        order = order[np.argsort(part[order], kind="stable")]
        bounds = np.searchsorted(part[order], np.arange(assignment.parts + 1))
        row = np.empty(len(part), dtype=np.int32)
        row[order] = np.arange(len(part)) - bounds[part[order]]
        members = tuple(order[bounds[p] : bounds[p + 1]] for p in range(assignment.parts))
        placements[node_type] = _Placement(np.ascontiguousarray(part), row, members)
    return placements


@dataclass(frozen=True)
class _BlockArrays:
    """Arrays of the T × P blocks of one direction, ordered by edge type and then part."""

    rows: list[NumpyArray] = field(default_factory=list)
    degrees: list[NumpyArray] = field(default_factory=list)
    remote_rows: list[NumpyArray] = field(default_factory=list)  # [E] rows of the other ends in their part
    edge_ids: list[NumpyArray] = field(default_factory=list)


class _ShardWriter:
    """Writes the parts of a partition: nodes and in-edges of all parts first, then out-edges."""

    def __init__(self, graph: Graph, placements: dict[str, _Placement], writers: list[BundleWriter]) -> None:
        self._graph, self._placements, self._writers = graph, placements, writers
        self._parts = len(writers)

    def write_nodes(self, part: int) -> None:
        out = self._writers[part]
        for node_type, nodes in self._graph.nodes.items():
            members = torch.from_numpy(self._placements[node_type].members[part])
            folder = node_dir(node_type)
            out.put(f"{folder}/store_ids.npy", members)
            for name, table in (("x", nodes.x), ("y", nodes.y)):
                if table is not None:
                    out.put(f"{folder}/{name}.npy", gather(table, members))
            if nodes.split is not None:
                out.put(f"{folder}/split.npy", nodes.split[:, members])

    def write_in_edges(self, part: int) -> None:
        blocks = _BlockArrays()
        for edge_type, edges in self._graph.edges.items():
            source = self._placements[edge_type.src]
            members = self._placements[edge_type.dst].members[part]
            arguments = (edges.indptr, edges.src, members, source.owner, source.row)
            num_edges, num_rows = np.zeros(self._parts, dtype=np.int64), np.zeros(self._parts, dtype=np.int64)
            _native.count_blocks(*arguments, num_edges, num_rows)
            edge_end, row_end = np.cumsum(num_edges), np.cumsum(num_rows)
            row, degree = np.empty(num_rows.sum(), np.int32), np.empty(num_rows.sum(), np.int64)
            remote_row, edge_id = np.empty(num_edges.sum(), np.int32), np.empty(num_edges.sum(), np.int64)
            edge_start, row_start = edge_end - num_edges, row_end - num_rows  # the kernel moves both in place
            _native.fill_blocks(*arguments, edge_start, row_start, row, degree, remote_row, edge_id)
            blocks.rows.extend(np.split(row, row_end[:-1]))
            blocks.degrees.extend(np.split(degree, row_end[:-1]))
            blocks.remote_rows.extend(np.split(remote_row, edge_end[:-1]))
            blocks.edge_ids.extend(np.split(edge_id, edge_end[:-1]))
        self._write_blocks(part, "in", blocks)

    def write_out_edges(self, part: int) -> None:
        """Transpose the in-edges that all parts have from this part."""
        blocks = _BlockArrays()
        for number, edge_type in enumerate(self._graph.edges):
            num_sources = len(self._placements[edge_type.src].members[part])
            for q in range(self._parts):
                row, indptr, col, edge_id = self._written_block(q, number, part)
                source = col if q == part else self._written_recv(q, edge_type.src, part)[col.long()]
                offsets, order = csr.counting_sort(source.contiguous(), num_sources)
                degree = offsets.diff().numpy()
                rows = np.flatnonzero(degree)
                destination = torch.repeat_interleave(row, indptr.diff(), output_size=len(col))
                blocks.rows.append(rows.astype(np.int32))
                blocks.degrees.append(degree[rows])
                blocks.remote_rows.append(destination[order].numpy())
                blocks.edge_ids.append(edge_id[order].numpy())
        self._write_blocks(part, "out", blocks)
        out = self._writers[part]
        for node_type in self._graph.nodes:
            # This part sends the rows that others receive; lists are ascending on both sides.
            sources = [self._written_recv(q, node_type, part).numpy() for q in range(self._parts)]
            _put_lists(out, halo_plan_dir("in", node_type), "give", sources)
            edge_types = self._edge_types("dst", node_type)
            destinations = [np.empty(0, np.int32)] * self._parts
            for q in range(self._parts):
                if edge_types and q != part:
                    by_type = [self._written_block(part, number, q)[0].numpy() for number in edge_types]
                    destinations[q] = np.unique(np.concatenate(by_type))
            _put_lists(out, halo_plan_dir("out", node_type), "give", destinations)

    def _write_blocks(self, part: int, direction: str, blocks: _BlockArrays) -> None:
        out = self._writers[part]
        for node_type in self._graph.nodes:
            edge_types = self._edge_types("src" if direction == "in" else "dst", node_type)
            recv_rows = [np.empty(0, np.int32)] * self._parts
            for q in range(self._parts):
                if q == part:
                    continue
                numbers = [number * self._parts + q for number in edge_types]
                rank = np.empty(len(self._placements[node_type].members[q]), np.int32)
                _native.rank_distinct(_concatenate([blocks.remote_rows[b] for b in numbers], np.int32), rank)
                recv_rows[q] = np.flatnonzero(rank >= 0).astype(np.int32)
                for b in numbers:
                    blocks.remote_rows[b] = rank[blocks.remote_rows[b]]
            _put_lists(out, halo_plan_dir(direction, node_type), "need", recv_rows)
        degrees = _concatenate(blocks.degrees, np.int64)
        arrays = {
            "row_start": np.cumsum([0, *map(len, blocks.rows)]),
            "indptr": np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
            "rows": _concatenate(blocks.rows, np.int32),
            "cols": _concatenate(blocks.remote_rows, np.int32),
            "edge_ids": _concatenate(blocks.edge_ids, np.int64),
        }
        for name, array in arrays.items():
            out.put(f"{direction}/{name}.npy", torch.from_numpy(array))
        self._write_edge_data(part, direction, blocks)

    def _write_edge_data(self, part: int, direction: str, blocks: _BlockArrays) -> None:
        # Weights are stored in both directions, since backward passes read out-edges.
        names = ("weight", "attr", "time") if direction == "in" else ("weight",)
        for number, edges in enumerate(self._graph.edges.values()):
            of_type = slice(number * self._parts, (number + 1) * self._parts)
            edge_ids = torch.from_numpy(np.concatenate(blocks.edge_ids[of_type]))
            for name in names:
                if (table := getattr(edges, name)) is not None:
                    self._writers[part].put(edge_data_path(direction, number, name), gather(table, edge_ids))

    def _edge_types(self, end: str, node_type: str) -> list[int]:
        """Numbers of the edge types that have ``node_type`` at their end ``src`` or ``dst``."""
        return [i for i, edge_type in enumerate(self._graph.edges) if getattr(edge_type, end) == node_type]

    def _written_recv(self, part: int, node_type: str, q: int) -> Tensor:
        """The rows of part q that a part receives for its in-edges, as written."""
        writer, folder = self._writers[part], halo_plan_dir("in", node_type)
        low, high = writer.written(f"{folder}/need_start.npy")[q : q + 2].tolist()
        return writer.written(f"{folder}/need.npy")[low:high]

    def _written_block(self, part: int, number: int, q: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows, indptr, cols, edge ids) of the in-edges of edge type ``number`` from part q, as written."""
        writer, block = self._writers[part], number * self._parts + q
        low, high = writer.written("in/row_start.npy")[block : block + 2].tolist()
        indptr = writer.written("in/indptr.npy")[low : high + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        row, col, edge_id = (writer.written(f"in/{name}.npy") for name in ("rows", "cols", "edge_ids"))
        return row[low:high], indptr - first, col[first:last], edge_id[first:last]


def _concatenate(arrays: list[NumpyArray], dtype: type) -> NumpyArray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _put_lists(out: BundleWriter, folder: str, name: str, lists: list[NumpyArray]) -> None:
    out.put(f"{folder}/{name}.npy", torch.from_numpy(np.concatenate(lists).astype(np.int32)))
    out.put(f"{folder}/{name}_start.npy", torch.from_numpy(np.cumsum([0, *map(len, lists)])))
