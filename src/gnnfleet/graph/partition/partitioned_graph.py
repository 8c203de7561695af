"""A partitioned graph on disk: one directory per part (``Shard``), the assignment, and what it costs.

Writing goes part by part: memory is a few numbers per node plus the edges of one part. First the in-edges of every part
are cut by the part of their source; the block q → p written there is then turned round to become q's out-edges for p,
so the whole graph is never transposed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.graph.partition.partition_metrics import PartitionMetrics, measure_partition
from gnnfleet.graph.partition.shard import KIND as PART
from gnnfleet.graph.partition.shard import Shard, edge_data_path, halo_plan_dir, partition_errors
from gnnfleet.graph.reorder import cluster_positions
from gnnfleet.graph.store import node_dir
from gnnfleet.io.bundle import Bundle, BundleWriter
from gnnfleet.ops import csr
from gnnfleet.ops import gather as rows
from gnnfleet.ops.native import _native
from gnnfleet.report.progress import NoProgress, Progress

KIND = "partition"


@dataclass(frozen=True)
class Placement:
    """Where the nodes of one type go: ``owner[v]`` is the part, ``local[v]`` the row there; ``members`` reverses it."""

    owner: NumpyArray  # [n] int32
    row: NumpyArray  # [n] int32
    members: tuple[NumpyArray, ...]  # P lists of store ids in part order, int64


class Partition:
    """A partition opened for reading."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.parts: int = bundle.meta["parts"]
        self.summary: dict[str, Any] = bundle.meta["quality"]

    @classmethod
    def open(cls, path: str | Path, graph: Graph | None = None) -> Partition:
        """Open and check every part; raises PartitionError when damaged or made from another store than ``graph``'s."""
        with partition_errors(path):
            partition = cls(Bundle.open(path, KIND))
            for part in range(partition.parts):
                partition.shard(part)
            made_from = partition.bundle.meta["store"]
        if graph is not None and graph.store is not None and made_from != graph.store.digest:
            raise PartitionError(f"{path} was made from another version of this graph: partition it again")
        return partition

    def shard(self, part: int) -> Shard:
        """Open one part; raises PartitionError when its manifest is not the one this partition was written with."""
        with partition_errors(self.bundle.path):
            shard = Shard.open(self.bundle.path / part_dir(part))
            digest = self.bundle.meta["part_digests"][part]
        if shard.bundle.digest != digest:
            raise PartitionError(f"{shard.bundle.path} belongs to another partition: partition the graph again")
        return shard

    def part_bundles(self) -> list[Bundle]:
        """The partition's own files and those of all parts."""
        return [self.bundle, *(self.shard(part).bundle for part in range(self.parts))]

    def assignment(self) -> Tensor:
        """[nodes] int32: the part of every node, node types numbered through."""
        with partition_errors(self.bundle.path):
            self.bundle.verify(names=["assignment.npy"])
            return self.bundle.tensor("assignment.npy")


def assignment_of(shard: Shard) -> Tensor:
    """``Partition.assignment`` of the partition a part lies in; raises PartitionError where it lies alone."""
    with partition_errors(shard.bundle.path.parent):
        return Partition(Bundle.open(shard.bundle.path.parent, KIND)).assignment()


def open_part(path: str | Path, part: int) -> Shard:
    """One part of a partition, where the others need not be; raises PartitionError."""
    with partition_errors(path):
        return Partition(Bundle.open(path, KIND)).shard(part)


def write_partition(
    graph: Graph,
    assignment: Assignment,
    path: str | Path,
    *,
    overwrite: bool = False,
    quality: PartitionMetrics | None = None,
    progress: Progress | None = None,
) -> Partition:
    """Cut the graph's data along an assignment and write it, whole or not at all."""
    progress = progress or NoProgress()
    quality = quality or measure_partition(graph, assignment.part, assignment.parts, progress=progress)
    progress.stage("order")
    places = place_nodes(graph, assignment)
    with BundleWriter(path, kind=KIND, overwrite=overwrite) as out, ExitStack() as stack:
        writers = [
            stack.enter_context(BundleWriter(out.path / part_dir(p), kind=PART)) for p in range(assignment.parts)
        ]
        advance = progress.stage("in-edges", assignment.parts)
        for part, writer in enumerate(writers):
            _write_nodes(graph, places, part, writer)
            _write_in_edges(graph, places, part, writer)
            advance(1)
        advance = progress.stage("out-edges", assignment.parts)
        for part in range(assignment.parts):
            _write_out_edges(graph, places, part, writers)
            advance(1)
        for part, writer in enumerate(writers):
            writer.commit(_part_meta(graph, part, assignment.parts))
        out.put("assignment.npy", torch.from_numpy(assignment.part))
        out.commit(
            {
                "parts": assignment.parts,
                "method": assignment.method,
                "balance": assignment.balance,
                "seed": assignment.seed,
                "store": graph.store.digest if graph.store else None,
                "part_digests": [Bundle.open(writer.target, PART).digest for writer in writers],
                "quality": quality.summary(),
            }
        )
    return Partition.open(path)


def part_dir(part: int) -> str:
    return f"part-{part:05d}"


def place_nodes(graph: Graph, assignment: Assignment) -> dict[str, Placement]:
    """Number every type's nodes inside their parts, neighbours close together."""
    near = cluster_positions(EdgeScan(graph), seed=assignment.seed)
    places = {}
    for kind, start in graph.node_offsets.items():
        own = slice(start, start + graph.nodes[kind].count)
        part = assignment.part[own]
        order = np.argsort(near[own])
        order = order[np.argsort(part[order], kind="stable")]
        bounds = np.searchsorted(part[order], np.arange(assignment.parts + 1))
        local = np.empty(len(part), dtype=np.int32)
        local[order] = np.arange(len(part)) - bounds[part[order]]
        members = tuple(order[bounds[p] : bounds[p + 1]] for p in range(assignment.parts))
        places[kind] = Placement(np.ascontiguousarray(part), local, members)
    return places


def _part_meta(graph: Graph, part: int, parts: int) -> dict[str, Any]:
    return {
        "part": part,
        "parts": parts,
        "node_types": list(graph.nodes),
        "edge_types": [list(kind) for kind in graph.edges],
    }


def _write_nodes(graph: Graph, places: dict[str, Placement], part: int, out: BundleWriter) -> None:
    for kind, nodes in graph.nodes.items():
        members = torch.from_numpy(places[kind].members[part])
        folder = node_dir(kind)
        out.put(f"{folder}/store_ids.npy", members)
        for name, table in (("x", nodes.x), ("y", nodes.y)):
            if table is not None:
                out.put(f"{folder}/{name}.npy", rows.gather(table, members))
        if nodes.split is not None:
            out.put(f"{folder}/split.npy", nodes.split[:, members])


@dataclass
class _BlocksInProgress:
    """Blocks of one direction while they are made: T × P of them in order, far ends by type and part."""

    rows: list[NumpyArray]
    degrees: list[NumpyArray]
    remote_rows: list[NumpyArray]  # rows at the far part
    edge_ids: list[NumpyArray]

    def far_of(self, places_in_list: list[int]) -> NumpyArray:
        return (
            np.concatenate([self.remote_rows[b] for b in places_in_list]) if places_in_list else np.empty(0, np.int32)
        )


def _write_in_edges(graph: Graph, places: dict[str, Placement], part: int, out: BundleWriter) -> None:
    parts = len(next(iter(places.values())).members) if places else 1
    blocks = _BlocksInProgress([], [], [], [])
    for kind, edges in graph.edges.items():
        source = places[kind.src]
        arguments = (edges.indptr, edges.src, places[kind.dst].members[part], source.owner, source.row)
        num_edges, num_rows = np.zeros(parts, dtype=np.int64), np.zeros(parts, dtype=np.int64)
        _native.count_blocks(*arguments, num_edges, num_rows)
        edge_start, row_start = np.cumsum(num_edges) - num_edges, np.cumsum(num_rows) - num_rows
        row, degree = np.empty(num_rows.sum(), np.int32), np.empty(num_rows.sum(), np.int64)
        far, edge_id = np.empty(num_edges.sum(), np.int32), np.empty(num_edges.sum(), np.int64)
        _native.fill_blocks(*arguments, edge_start, row_start, row, degree, far, edge_id)
        # The kernel moved both starts to the ends of their blocks.
        for whole, pieces, ends in (
            (row, blocks.rows, row_start),
            (degree, blocks.degrees, row_start),
            (far, blocks.remote_rows, edge_start),
            (edge_id, blocks.edge_ids, edge_start),
        ):
            pieces.extend(np.split(whole, ends[:-1]))
    _write_blocks(graph, places, part, blocks, "in", out)


def _write_out_edges(graph: Graph, places: dict[str, Placement], part: int, writers: list[BundleWriter]) -> None:
    parts = len(writers)
    blocks = _BlocksInProgress([], [], [], [])
    for number, kind in enumerate(graph.edges):
        own_rows = len(places[kind.src].members[part])
        for q in range(parts):
            row, indptr, col, edge_id = _written_block(writers[q], number * parts + part)
            near = col if q == part else _written_list(writers[q], "in", kind.src, "need", part)[col.long()]
            offsets, order = csr.counting_sort(near.contiguous(), own_rows)
            degree = offsets.diff().numpy()
            busy = np.flatnonzero(degree)
            far = torch.repeat_interleave(row, indptr.diff(), output_size=len(col))[order]
            blocks.rows.append(busy.astype(np.int32))
            blocks.degrees.append(degree[busy])
            blocks.remote_rows.append(far.numpy())
            blocks.edge_ids.append(edge_id[order].numpy())
    _write_blocks(graph, places, part, blocks, "out", writers[part])
    for node_type in graph.nodes:
        # What this part gives is what the others said they need; both lists were made ascending.
        given = [_written_list(writers[q], "in", node_type, "need", part).numpy() for q in range(parts)]
        _put_lists(writers[part], halo_plan_dir("in", node_type), "give", given)
        into = [number for number, edge_type in enumerate(graph.edges) if edge_type.dst == node_type]
        given = [
            np.unique(np.concatenate([_written_block(writers[part], n * parts + q)[0].numpy() for n in into]))
            if into and q != part
            else np.empty(0, np.int32)
            for q in range(parts)
        ]
        _put_lists(writers[part], halo_plan_dir("out", node_type), "give", given)


def _write_blocks(
    graph: Graph, places: dict[str, Placement], part: int, blocks: _BlocksInProgress, direction: str, out: BundleWriter
) -> None:
    parts = len(next(iter(places.values())).members) if places else 1
    for kind in graph.nodes:
        mine = [n for n, t in enumerate(graph.edges) if (t.src if direction == "in" else t.dst) == kind]
        needed = []
        for q in range(parts):
            here = [number * parts + q for number in mine]
            if q == part:
                needed.append(np.empty(0, np.int32))
                continue
            rank = np.empty(len(places[kind].members[q]), np.int32)
            _native.rank_distinct(blocks.far_of(here), rank)
            needed.append(np.flatnonzero(rank >= 0).astype(np.int32))
            for block in here:
                blocks.remote_rows[block] = rank[blocks.remote_rows[block]]
        _put_lists(out, halo_plan_dir(direction, kind), "need", needed)
    row_start = np.cumsum([0, *(len(r) for r in blocks.rows)])
    degrees = np.concatenate(blocks.degrees) if blocks.degrees else np.empty(0, np.int64)
    out.put(f"{direction}/row_start.npy", torch.from_numpy(row_start))
    out.put(f"{direction}/indptr.npy", torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)))
    for name, pieces, dtype in (
        ("rows", blocks.rows, np.int32),
        ("cols", blocks.remote_rows, np.int32),
        ("edge_ids", blocks.edge_ids, np.int64),
    ):
        out.put(f"{direction}/{name}.npy", torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, dtype)))
    _write_edge_data(graph, parts, blocks, direction, out)


def _write_edge_data(graph: Graph, parts: int, blocks: _BlocksInProgress, direction: str, out: BundleWriter) -> None:
    """Weights go with both copies of an edge, as backward passes read out-edges; features and times with in-edges."""
    for number, edges in enumerate(graph.edges.values()):
        edge_ids = torch.from_numpy(np.concatenate(blocks.edge_ids[number * parts : (number + 1) * parts]))
        for name in ("weight", "attr", "time") if direction == "in" else ("weight",):
            if (table := getattr(edges, name)) is not None:
                out.put(edge_data_path(direction, number, name), rows.gather(table, edge_ids))


def _put_lists(out: BundleWriter, folder: str, name: str, lists: list[NumpyArray]) -> None:
    out.put(f"{folder}/{name}.npy", torch.from_numpy(np.concatenate(lists).astype(np.int32)))
    out.put(f"{folder}/{name}_start.npy", torch.from_numpy(np.cumsum([0, *(len(rows) for rows in lists)])))


def _written_list(writer: BundleWriter, direction: str, kind: str, name: str, q: int) -> Tensor:
    folder = halo_plan_dir(direction, kind)
    low, high = writer.written(f"{folder}/{name}_start.npy")[q : q + 2].tolist()
    return writer.written(f"{folder}/{name}.npy")[low:high]


def _written_block(writer: BundleWriter, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high = writer.written("in/row_start.npy")[place : place + 2].tolist()
    indptr = writer.written("in/indptr.npy")[low : high + 1]
    first, last = int(indptr[0]), int(indptr[-1])
    row, col, edge_id = writer.written("in/rows.npy"), writer.written("in/cols.npy"), writer.written("in/edge_ids.npy")
    return row[low:high], indptr - first, col[first:last], edge_id[first:last]
