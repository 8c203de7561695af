"""Export of a graph to Parquet: nodes and edges with their original ids, in batches, all files or none.

    nodes.parquet   id, x (list), label (class name or number), split
    edges.parquet   src, dst, weight, time, x (list), label (class number)

A heterogeneous graph has one file per type: ``nodes-user.parquet``, ``edges-user+buys+product.parquet``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gnnfleet.errors import StoreError
from gnnfleet.graph.graph import SPLITS, Edges, EdgeType, Graph, Nodes, labelled_rows
from gnnfleet.graph.store import edge_dir, node_dir
from gnnfleet.io.atomic import partial_path
from gnnfleet.report.progress import Progress

_ROWS_PER_BATCH = 1 << 17
_VALUES_PER_BATCH = 1 << 23


def export_tables(graph: Graph, directory: str | Path, *, progress: Progress | None = None) -> dict[str, int]:
    """Write a graph as tables to a new directory and return the number of rows of each file.

    Raises StoreError if the directory exists and is not empty.
    """
    progress = progress or Progress()
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target} already exists: choose another output or remove it")
    partial = partial_path(target)
    partial.mkdir(parents=True)
    files: dict[str, int] = {}
    try:
        tables = [(node_dir(node_type), n.count, _node_batches(n)) for node_type, n in graph.nodes.items()]
        tables += [(edge_dir(kind), e.count, _edge_batches(graph, kind)) for kind, e in graph.edges.items()]
        for folder, rows, batches in tables:
            name = (folder.replace("/", "-", 1) if graph.is_hetero else folder.partition("/")[0]) + ".parquet"
            files[name] = _write(partial / name, batches, progress.stage(name, rows))
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files


def _write(path: Path, batches: Iterator[pa.RecordBatch], advance: Any) -> int:
    first, rows = next(batches), 0
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
            rows += batch.num_rows
            advance(batch.num_rows)
    return rows


def _ranges(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Row ranges of batches; one empty range for no rows, so that the file gets its columns."""
    step = min(_ROWS_PER_BATCH, max(1024, _VALUES_PER_BATCH // max(width, 1)))
    for start in range(0, max(count, 1), step):
        yield start, min(start + step, count)


def _node_batches(nodes: Nodes) -> Iterator[pa.RecordBatch]:
    for start, stop in _ranges(nodes.count, 0 if nodes.x is None else nodes.x.shape[1]):
        columns: dict[str, Any] = {"id": nodes.ids.select(np.arange(start, stop))}
        if nodes.x is not None:
            columns["x"] = _lists(nodes.x[start:stop])
        if nodes.y is not None and nodes.regression and nodes.y.dim() == 2:
            names = nodes.classes or range(nodes.num_classes)
            columns |= {f"label_{name}": _labels(nodes.y[start:stop, k]) for k, name in enumerate(names)}
        elif nodes.y is not None:
            columns["label"] = _labels(nodes.y[start:stop], nodes.classes)
        if nodes.split is not None:
            columns.update(_split_columns(nodes.split[:, start:stop]))
        yield pa.record_batch(columns)


def _labels(y: Tensor, classes: Sequence[str] = ()) -> pa.Array:
    missing = ~np.asarray(labelled_rows(y))
    if y.dim() == 2:
        return _lists(y, missing=missing & (y.shape[1] > 0))
    if not classes or y.is_floating_point():
        return pa.array(np.asarray(y), mask=missing)
    names = pa.array(classes, pa.large_string())
    return names.take(pa.array(np.asarray(y), mask=missing))


def _split_columns(split: Tensor) -> dict[str, pa.Array]:
    """One column per split: ``split``, or ``split_0``, ``split_1``, … where there are several."""
    names = pa.array(list(SPLITS))
    columns = {}
    for k, codes in enumerate(split):
        column = "split" if len(split) == 1 else f"split_{k}"
        columns[column] = names.take(pa.array(np.asarray(codes).astype(np.int64), mask=np.asarray(codes < 0)))
    return columns


def _edge_batches(graph: Graph, kind: EdgeType) -> Iterator[pa.RecordBatch]:
    edges = graph.edges[kind]
    order = edges.order if edges.order is not None and _parallel_edges_follow_time(edges) else None
    src_ids, dst_ids = graph.nodes[kind.src].ids, graph.nodes[kind.dst].ids
    for start, stop in _ranges(edges.count, 0 if edges.attr is None else edges.attr.shape[1]):
        # Timed edges are written in time order, so that simultaneous events keep their order in a later import.
        at = torch.arange(start, stop) if order is None else order[start:stop]
        columns: dict[str, Any] = {
            "src": src_ids.select(edges.src[at]),
            "dst": dst_ids.select(_destinations(edges, at)),
        }
        if edges.weight is not None:
            columns["weight"] = pa.array(np.asarray(edges.weight[at]))
        if edges.time is not None:
            columns["time"] = pa.array(np.asarray(edges.time[at]))
        if edges.attr is not None:
            columns["x"] = _lists(edges.attr[at])
        if edges.y is not None:
            columns["label"] = _labels(edges.y[at])
        yield pa.record_batch(columns)


def _destinations(edges: Edges, at: Tensor) -> Tensor:
    return torch.searchsorted(edges.indptr, at, right=True) - 1


def _parallel_edges_follow_time(edges: Edges) -> bool:
    """True if edges between the same two nodes are in time order in the store."""
    assert edges.time is not None
    for start in range(0, edges.count - 1, _ROWS_PER_BATCH):
        at = torch.arange(start, min(start + _ROWS_PER_BATCH + 1, edges.count))
        src, dst, time = edges.src[at], _destinations(edges, at), edges.time[at]
        same = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1])
        if bool((same & (time[1:] < time[:-1])).any()):
            return False
    return True


def _lists(rows: Tensor, missing: Any = None) -> pa.Array:
    """[n, F] as a column of lists; half precision becomes float32, which more tools can read."""
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    values = pa.array(np.ascontiguousarray(rows).reshape(-1))
    offsets = pa.array(np.arange(rows.shape[0] + 1, dtype=np.int64) * rows.shape[1])
    if missing is None or not missing.any():
        return pa.LargeListArray.from_arrays(offsets, values)
    mask = pa.array(missing)
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)
