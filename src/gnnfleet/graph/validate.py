"""Whether a graph or a part on disk may be computed with: kernels take every index they are given for good.

Opening maps files and reads none of them. Before a run works on them, arrays that hold indices are compared with their
checksums and every index with what it points into, whatever their size; features, labels and the like are compared
where all files together are small. ``gnnfleet info --verify`` compares everything.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.errors import PartitionError, StoreError
from gnnfleet.graph.graph import NO_SPLIT, TEST, Edges, Graph, Nodes
from gnnfleet.graph.partition.partitioned_graph import open_part
from gnnfleet.graph.partition.shard import DIRECTIONS, Shard
from gnnfleet.graph.store import open_store
from gnnfleet.io.bundle import Bundle

FULL_CHECK_BYTES = 1 << 30
"""Bytes that are read in a second or so."""
_DATA = ("x.npy", "y.npy", "weight", "attr", "time", "ids.parquet")
_PIECE = 1 << 24


def validate_graph(graph: Graph) -> None:
    """Raise StoreError when the store of a graph was altered, or names nodes that are not there.

    A graph in memory was checked when it was made.
    """
    if graph.store is None:
        return
    _compare(graph.store)
    try:
        for kind, nodes in graph.nodes.items():
            _check_nodes(nodes, f"nodes of type {kind}")
        for edge_type, edges in graph.edges.items():
            _check_edges(edges, graph.nodes[edge_type.src].count, f"edges {edge_type}")
            for name, pairs in edges.links.items():
                if pairs.dim() != 2 or pairs.shape[0] != 2:
                    raise ValueError(f"links {name} of {edge_type} are no pairs")
                for end, kind in zip(pairs, (edge_type.src, edge_type.dst), strict=True):
                    _check_range(end, 0, graph.nodes[kind].count - 1, f"links {name} of {edge_type}")
    except ValueError as error:
        raise StoreError(f"{graph.store.path}: {error}: make the store again from its source") from error


def validate_shard(shard: Shard) -> None:
    """The same for a part; raises PartitionError."""
    try:
        _compare(shard.bundle)
        counts = {kind: shard.nodes(kind).count for kind in shard.node_types}
        for direction in DIRECTIONS:
            needs = {kind: shard.plan(kind, direction) for kind in shard.node_types}
            for kind, plan in needs.items():
                for given in plan.send:
                    _check_range(given, 0, counts[kind] - 1, f"{direction}-edges: rows of {kind} that are sent")
            for edge_type in shard.edge_types:
                near, far = (edge_type.dst, edge_type.src) if direction == "in" else (edge_type.src, edge_type.dst)
                for q in range(shard.parts):
                    block, what = shard.block(edge_type, direction, q), f"{direction}-edges {edge_type} with part {q}"
                    _check_range(block.rows, 0, counts[near] - 1, what)
                    _check_indptr(block.indptr, len(block.cols), what)
                    columns = counts[far] if q == shard.part else len(needs[far].recv[q])
                    _check_range(block.cols, 0, columns - 1, what)
    except (StoreError, ValueError, KeyError, IndexError, TypeError) as error:
        raise PartitionError(f"{shard.bundle.path} cannot be used ({error}): partition the graph again") from error


def open_validated_store(path: str | Path) -> Graph:
    """Open a store and check it; raises StoreError. Arrays stay on disk: the graph may be larger than memory."""
    graph = open_store(path)
    validate_graph(graph)
    return graph


def open_validated_part(path: str | Path, part: int) -> Shard:
    """One part of a partition, checked, where the others need not be; raises PartitionError."""
    shard = open_part(path, part)
    validate_shard(shard)
    return shard


def _compare(bundle: Bundle) -> None:
    small = bundle.nbytes <= FULL_CHECK_BYTES
    bundle.verify(names=[name for name in bundle.files if small or not _is_data(name)])


def _is_data(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_DATA)


def _check_nodes(nodes: Nodes, what: str) -> None:
    if nodes.x is not None and (nodes.x.dim() != 2 or not nodes.x.is_floating_point()):
        raise ValueError(f"{what} have features of {nodes.x.dtype} {list(nodes.x.shape)}")
    if nodes.y is not None and (nodes.y.dtype, nodes.y.dim()) not in ((torch.int64, 1), (torch.int8, 2)):
        raise ValueError(f"{what} have labels of {nodes.y.dtype} {list(nodes.y.shape)}")
    if nodes.split is not None:
        if nodes.split.dim() != 2:
            raise ValueError(f"{what} have split codes of shape {list(nodes.split.shape)}")
        _check_range(nodes.split, NO_SPLIT, TEST, f"split codes of {what}")


def _check_edges(edges: Edges, sources: int, what: str) -> None:
    _check_indptr(edges.indptr, edges.count, what)
    _check_range(edges.src, 0, sources - 1, f"sources of {what}")
    for name, data in (
        ("weight", edges.weight),
        ("attr", edges.attr),
        ("time", edges.time),
        ("order", edges.order),
        ("y", edges.y),
    ):
        if data is not None and data.shape[:1] != (edges.count,):
            raise ValueError(f"{what} have {list(data.shape)} of {name}, expected {edges.count}")
    if edges.order is not None:
        _check_range(edges.order, 0, edges.count - 1, f"order of {what}")


def _check_indptr(indptr: Tensor, count: int, what: str) -> None:
    if indptr.dim() != 1 or indptr.dtype is not torch.int64 or not len(indptr):
        raise ValueError(f"{what} have no list of starts")
    if int(indptr[0]) != 0 or int(indptr[-1]) != count:
        raise ValueError(f"{what} start at {int(indptr[0])} and end at {int(indptr[-1])}, expected 0 and {count}")
    for low in range(0, len(indptr), _PIECE):
        if not bool((indptr[low : low + _PIECE + 1].diff() >= 0).all()):
            raise ValueError(f"{what} have starts that do not grow")


def _check_range(values: Tensor, low: int, high: int, what: str) -> None:
    """In pieces: a list may be larger than memory."""
    if values.is_floating_point():
        raise ValueError(f"{what} are {values.dtype}, expected whole numbers")
    flat = values.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        least, most = (int(bound) for bound in torch.aminmax(flat[start : start + _PIECE]))
        if least < low or most > high:
            raise ValueError(f"{what} have {least if least < low else most}, expected {low} to {high}")
