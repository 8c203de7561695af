"""Validation of stores and partitions before a run: kernels do not check the indices they receive.

Opening a store maps its files without reading them. Before a run, index arrays are compared with their checksums, and
all indices with their valid range. Features, labels and other data are compared with their checksums if all files
together are small. ``gnnfleet info --verify`` compares everything.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.errors import PartitionError, StoreError
from gnnfleet.graph.graph import EDGE_DATA, NO_SPLIT, TEST, Edges, Graph, Nodes
from gnnfleet.graph.partition.partitioned_graph import open_part
from gnnfleet.graph.partition.shard import DIRECTIONS, Shard
from gnnfleet.graph.store import open_store
from gnnfleet.io.bundle import Bundle

FULL_CHECK_BYTES = 1 << 30  # takes about a second to read
_DATA = ("x.npy", "y.npy", "weight", "attr", "time", "ids.parquet")
_CHUNK = 1 << 24


def validate_graph(graph: Graph) -> None:
    """Raise StoreError if the store of a graph was altered or has indices out of range.

    A graph in memory was checked by its constructor.
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
                    raise ValueError(f"links {name} of {edge_type} have shape {list(pairs.shape)}, expected [2, L]")
                for end, kind in zip(pairs, (edge_type.src, edge_type.dst), strict=True):
                    _check_range(end, 0, graph.nodes[kind].count - 1, f"links {name} of {edge_type}")
    except ValueError as error:
        raise StoreError(f"{graph.store.path}: {error}: make the store again from its source") from error


def validate_shard(shard: Shard) -> None:
    """Raise PartitionError if a part was altered or has indices out of range."""
    try:
        _compare(shard.bundle)
        counts = {kind: shard.nodes(kind).count for kind in shard.node_types}
        for direction in DIRECTIONS:
            plans = {kind: shard.plan(kind, direction) for kind in shard.node_types}
            for kind, plan in plans.items():
                for sent_rows in plan.send:
                    _check_range(sent_rows, 0, counts[kind] - 1, f"{direction}-edges: rows of {kind} to send")
            for edge_type in shard.edge_types:
                local, remote = (edge_type.dst, edge_type.src) if direction == "in" else (edge_type.src, edge_type.dst)
                for q in range(shard.parts):
                    block, name = shard.block(edge_type, direction, q), f"{direction}-edges {edge_type} with part {q}"
                    _check_range(block.rows, 0, counts[local] - 1, name)
                    _check_indptr(block.indptr, len(block.cols), name)
                    columns = counts[remote] if q == shard.part else len(plans[remote].recv[q])
                    _check_range(block.cols, 0, columns - 1, name)
    except (StoreError, ValueError, KeyError, IndexError, TypeError) as error:
        raise PartitionError(f"{shard.bundle.path} cannot be used ({error}): partition the graph again") from error


def open_validated_store(path: str | Path) -> Graph:
    """Open a store and validate it; raises StoreError. Arrays stay on disk, so the graph may exceed memory."""
    graph = open_store(path)
    validate_graph(graph)
    return graph


def open_validated_part(path: str | Path, part: int) -> Shard:
    """Open and validate one part of a partition, whose other parts may be missing; raises PartitionError."""
    shard = open_part(path, part)
    validate_shard(shard)
    return shard


def _compare(bundle: Bundle) -> None:
    is_small = bundle.nbytes <= FULL_CHECK_BYTES
    bundle.verify(names=[name for name in bundle.files if is_small or not name.rpartition("/")[2].startswith(_DATA)])


def _check_nodes(nodes: Nodes, name: str) -> None:
    if nodes.x is not None and (nodes.x.dim() != 2 or not nodes.x.is_floating_point()):
        raise ValueError(f"{name} have features of {nodes.x.dtype} {list(nodes.x.shape)}")
    kinds = ((torch.int64, 1), (torch.int8, 2), (torch.float32, 1), (torch.float32, 2))
    if nodes.y is not None and (nodes.y.dtype, nodes.y.dim()) not in kinds:
        raise ValueError(f"{name} have labels of {nodes.y.dtype} {list(nodes.y.shape)}")
    if nodes.split is not None:
        if nodes.split.dim() != 2:
            raise ValueError(f"{name} have split codes of shape {list(nodes.split.shape)}")
        _check_range(nodes.split, NO_SPLIT, TEST, f"split codes of {name}")


def _check_edges(edges: Edges, sources: int, name: str) -> None:
    _check_indptr(edges.indptr, edges.count, name)
    _check_range(edges.src, 0, sources - 1, f"sources of {name}")
    for array in (*EDGE_DATA, "order"):
        values = getattr(edges, array)
        if values is not None and values.shape[:1] != (edges.count,):
            raise ValueError(f"{name} have {array} of shape {list(values.shape)}, expected {edges.count} rows")
    if edges.order is not None:
        _check_range(edges.order, 0, edges.count - 1, f"order of {name}")


def _check_indptr(indptr: Tensor, count: int, name: str) -> None:
    if indptr.dim() != 1 or indptr.dtype is not torch.int64 or not len(indptr):
        raise ValueError(f"{name} have no offsets (indptr)")
    if int(indptr[0]) != 0 or int(indptr[-1]) != count:
        raise ValueError(f"{name} start at {int(indptr[0])} and end at {int(indptr[-1])}, expected 0 and {count}")
    for low in range(0, len(indptr), _CHUNK):
        if not bool((indptr[low : low + _CHUNK + 1].diff() >= 0).all()):
            raise ValueError(f"{name} have offsets (indptr) that decrease")


def _check_range(values: Tensor, low: int, high: int, name: str) -> None:
    """Check in chunks, since a list may be larger than memory."""
    if values.is_floating_point():
        raise ValueError(f"{name} are {values.dtype}, expected whole numbers")
    flat = values.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        least, most = (int(bound) for bound in torch.aminmax(flat[start : start + _CHUNK]))
        if least < low or most > high:
            raise ValueError(f"{name} have {least if least < low else most}, expected {low} to {high}")
