"""Rows of a graph in another order than the store's: by cluster, neighbours share cache lines.

Draws go by store id, so a view in another order gives the same results to rounding; store ids of rows are in
``node_ids``. Edges into a row are sorted by the row of their source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.graph.partitioners import CLUSTER_NODES
from gnnfleet.graph.partitioners.stream import cluster
from gnnfleet.graph.scan import EdgeScan
from gnnfleet.graph.view import LocalView, Relation, Rows
from gnnfleet.ops import csr


def cluster_order(graph: Graph, *, seed: int = 0) -> dict[str, Tensor]:
    """{node type: [N] int64 store ids}, clusters of neighbours one after the other."""
    label = torch.from_numpy(cluster(EdgeScan(graph), max_nodes=CLUSTER_NODES, seed=seed))
    return {
        kind: torch.argsort(label[start : start + graph.nodes[kind].count], stable=True)
        for kind, start in graph.node_offsets.items()
    }


def ordered_view(graph: Graph, order: Mapping[str, Tensor]) -> LocalView:
    """The whole graph with rows in the given order of store ids."""
    place = {}
    for kind, ids in order.items():
        place[kind] = torch.empty_like(ids)
        place[kind][ids] = torch.arange(len(ids))
    whole = LocalView.whole(graph)
    nodes = {
        kind: Rows(order[kind], rows.num_dst, PickedDegrees(rows.degree, order[kind]))
        for kind, rows in whole.nodes.items()
    }
    relations = {kind: _relation(edges, place[kind.src], place[kind.dst]) for kind, edges in graph.edges.items()}
    return LocalView(nodes, relations)


class PickedDegrees:
    """Some rows of another table of degrees, picked once."""

    def __init__(self, degree: Callable[[bool], Tensor], rows: Tensor) -> None:
        self._degree, self._rows = degree, rows
        self._known: dict[bool, Tensor] = {}

    def __call__(self, weighted: bool) -> Tensor:
        if weighted not in self._known:
            self._known[weighted] = self._degree(weighted)[self._rows]
        return self._known[weighted]


def _relation(edges: Edges, src_place: Tensor, dst_place: Tensor) -> Relation:
    index = edges.src.dtype
    src, dst = src_place.to(index)[edges.src.long()], dst_place.to(index)[edges.dst().long()]
    indptr, edge, src = csr.sort_into_rows(src, dst, num_src=len(src_place), num_dst=len(dst_place))
    return Relation(
        csr.Compressed(indptr, src, len(src_place)),
        edge,
        None if edges.weight is None else edges.weight[edge],
        None if edges.attr is None else edges.attr[edge],
    )
