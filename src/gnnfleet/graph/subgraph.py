"""Induced subgraphs: some nodes of a graph and the edges among them, without allocating arrays of the graph's size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import Edges, Graph, Nodes, index_dtype
from gnnfleet.ops.csr import offsets_of
from gnnfleet.ops.gather import gather

EDGES_AT_ONCE = 1 << 20  # edges examined per batch


def induced_subgraph(graph: Graph, ids: Mapping[str, Tensor]) -> Graph:
    """Select the nodes with these store ids (by type, ascending) and all edges between them.

    Rows are renumbered from 0. Held-out links are dropped. Raises InputError for ids out of range or out of order.
    """
    selected = {kind: ids.get(kind, torch.empty(0, dtype=torch.int64)).long() for kind in graph.nodes}
    for kind, rows in selected.items():
        count = graph.nodes[kind].count
        if len(rows) and (bool((rows.diff() <= 0).any()) or int(rows[0]) < 0 or int(rows[-1]) >= count):
            raise InputError(f"nodes of a subgraph must be ascending store ids below {count} without repeats")
    nodes = {kind: _nodes(table, selected[kind]) for kind, table in graph.nodes.items()}
    edges = {kind: _edges(table, selected[kind.src], selected[kind.dst]) for kind, table in graph.edges.items()}
    return Graph.of(nodes, edges, name=graph.name, undirected=graph.undirected)


def _nodes(table: Nodes, rows: Tensor) -> Nodes:
    return Nodes(
        count=len(rows),
        x=None if table.x is None else gather(table.x, rows),
        y=None if table.y is None else table.y[rows],
        classes=table.classes,
        split=None if table.split is None else table.split[:, rows],
    )


def _edges(table: Edges, src: Tensor, dst: Tensor) -> Edges:
    starts, ends = table.indptr[dst], table.indptr[dst + 1]
    sums = offsets_of(ends - starts)
    degrees, low = torch.zeros(len(dst), dtype=torch.int64), 0
    sources, positions = [torch.empty(0, dtype=index_dtype(len(src)))], [torch.empty(0, dtype=torch.int64)]
    while low < len(dst):
        high = max(low + 1, int(torch.searchsorted(sums, sums[low] + EDGES_AT_ONCE, right=True)) - 1)
        degree = (ends - starts)[low:high]
        row = torch.repeat_interleave(torch.arange(low, high), degree)
        edge = torch.arange(len(row)) + (starts - sums[:-1])[row] + sums[low]
        ids = table.src[edge].long()
        row_of_src = torch.searchsorted(src, ids).clamp(max=max(len(src) - 1, 0))
        inside = (src[row_of_src] == ids).nonzero()[:, 0] if len(src) else torch.empty(0, dtype=torch.int64)
        degrees += torch.bincount(row[inside], minlength=len(dst))
        sources.append(row_of_src[inside].to(index_dtype(len(src))))
        positions.append(edge[inside])
        low = high
    edge = torch.cat(positions)
    return Edges(
        indptr=offsets_of(degrees),
        src=torch.cat(sources),
        weight=None if table.weight is None else table.weight[edge],
        attr=None if table.attr is None else gather(table.attr, edge),
        y=None if table.y is None else table.y[edge],
    )
