"""A graph of some nodes of another one and the edges among them, in the same order; no array of the graph's size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import Edges, Graph, Nodes, index_dtype
from gnnfleet.ops.gather import gather

EDGES_AT_ONCE = 1 << 20
"""Edges looked at at a time."""


def induced_subgraph(graph: Graph, ids: Mapping[str, Tensor]) -> Graph:
    """The nodes with these store ids (by type, ascending) and all edges whose both ends are among them.

    Rows are numbered anew from 0. Held-out links stay behind. Raises InputError for ids out of range or out of order.
    """
    own = {kind: ids.get(kind, torch.empty(0, dtype=torch.int64)).long() for kind in graph.nodes}
    for kind, rows in own.items():
        count = graph.nodes[kind].count
        if len(rows) and (bool((rows.diff() <= 0).any()) or int(rows[0]) < 0 or int(rows[-1]) >= count):
            raise InputError(f"nodes of a subgraph must be ascending store ids below {count}, each once")
    nodes = {kind: _nodes(table, own[kind]) for kind, table in graph.nodes.items()}
    edges = {kind: _edges(table, own[kind.src], own[kind.dst]) for kind, table in graph.edges.items()}
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
    sums = torch.zeros(len(dst) + 1, dtype=torch.int64)
    torch.cumsum(ends - starts, 0, out=sums[1:])
    kept, found, low = torch.zeros(len(dst), dtype=torch.int64), [], 0
    positions = []
    while low < len(dst):
        high = max(low + 1, int(torch.searchsorted(sums, sums[low] + EDGES_AT_ONCE, right=True)) - 1)
        degree = (ends - starts)[low:high]
        row = torch.repeat_interleave(torch.arange(low, high), degree)
        edge = torch.arange(len(row)) + (starts - sums[:-1])[row] + sums[low]
        ids = table.src[edge].long()
        place = torch.searchsorted(src, ids).clamp(max=max(len(src) - 1, 0))
        inside = (src[place] == ids).nonzero()[:, 0] if len(src) else torch.empty(0, dtype=torch.int64)
        kept += torch.bincount(row[inside], minlength=len(dst))
        found.append(place[inside].to(index_dtype(len(src))))
        positions.append(edge[inside])
        low = high
    edge = torch.cat([torch.empty(0, dtype=torch.int64), *positions])
    indptr = torch.zeros(len(dst) + 1, dtype=torch.int64)
    torch.cumsum(kept, 0, out=indptr[1:])
    return Edges(
        indptr=indptr,
        src=torch.cat([torch.empty(0, dtype=index_dtype(len(src))), *found]),
        weight=None if table.weight is None else table.weight[edge],
        attr=None if table.attr is None else gather(table.attr, edge),
        y=None if table.y is None else table.y[edge],
    )
