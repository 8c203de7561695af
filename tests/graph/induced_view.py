"""Views of an induced subgraph: some nodes with all edges among them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.graph.views.local import LocalEdges, LocalView, graph_degrees
from gnnfleet.graph.views.view_base import NodeRows, selected_degrees
from gnnfleet.ops.csr import CSR


def induced_view(graph: Graph, nodes: Mapping[str, Tensor]) -> LocalView:
    """``nodes`` are ascending store ids by type."""
    rows, row_of_id = {}, {}
    for node_type, table in graph.nodes.items():
        ids = nodes.get(node_type, torch.empty(0, dtype=torch.int64)).long()
        row_of_id[node_type] = torch.full((table.count,), -1, dtype=torch.int64)
        row_of_id[node_type][ids] = torch.arange(len(ids))
        rows[node_type] = NodeRows(ids, len(ids), selected_degrees(graph_degrees(graph, node_type), ids))
    relations = {
        edge_type: _induce(edges, row_of_id[edge_type.src], rows[edge_type.src], rows[edge_type.dst])
        for edge_type, edges in graph.edges.items()
    }
    return LocalView(rows, relations)


def _induce(edges: Edges, row_of_id: Tensor, src: NodeRows, dst: NodeRows) -> LocalEdges:
    """The edges of a type among the rows of a subgraph; ``row_of_id`` is −1 for sources outside it."""
    starts, ends = edges.indptr[dst.node_ids], edges.indptr[dst.node_ids + 1]
    degree = ends - starts
    row = torch.repeat_interleave(torch.arange(len(degree)), degree)
    first = torch.zeros(len(degree) + 1, dtype=torch.int64)
    first[1:] = degree.cumsum(0)
    edge = torch.arange(len(row)) - first[row] + starts[row]
    col = row_of_id[edges.src[edge].long()]
    keep = col >= 0
    row, col, edge = row[keep], col[keep], edge[keep]
    indptr = torch.zeros(len(degree) + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(row, minlength=len(degree)).cumsum(0)
    structure = CSR(indptr, col.to(edges.src.dtype), len(src.node_ids))
    weight, attr = (None if data is None else data[edge] for data in (edges.weight, edges.attr))
    return LocalEdges(structure, edge, weight, attr)
