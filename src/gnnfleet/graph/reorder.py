"""Reordering of a graph's rows so that neighbours are close together, which speeds up aggregation most.

Clusters are nested: 400 rows of 128 floats fit the L2 cache of a core, and every level above has four times as many.
The order costs a few passes over the edges and a few numbers per node. Draws use store ids (``node_ids``), so results
agree to rounding. Edges into a row are sorted by the row of their source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnnfleet.graph.graph import Edges, Graph
from gnnfleet.graph.partition.edge_scan import EdgeScan, NumpyArray
from gnnfleet.graph.partition.streaming import cluster
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows, selected_degrees
from gnnfleet.ops import csr

MIN_CLUSTER, CLUSTER_GROWTH, MAX_CLUSTER = 400, 4, 25_600


def cluster_positions(scan: EdgeScan, *, seed: int = 0) -> NumpyArray:
    """[nodes] int32: the new position of every node, numbered across node types."""
    caps = [MIN_CLUSTER]
    while caps[-1] < min(MAX_CLUSTER, scan.num_nodes):
        caps.append(caps[-1] * CLUSTER_GROWTH)
    levels = [cluster(scan, max_nodes=cap, seed=seed) for cap in caps]
    positions = np.empty(scan.num_nodes, dtype=np.int32)
    positions[np.lexsort(levels)] = np.arange(scan.num_nodes, dtype=np.int32)
    return positions


def cluster_order(graph: Graph, *, seed: int = 0) -> dict[str, Tensor]:
    """{node type: [N] int64 store ids}, cluster after cluster."""
    positions = torch.from_numpy(cluster_positions(EdgeScan(graph), seed=seed))
    return {
        kind: torch.argsort(positions[start : start + graph.nodes[kind].count])
        for kind, start in graph.node_offsets.items()
    }


def reordered_view(graph: Graph, order: Mapping[str, Tensor]) -> LocalView:
    """View the whole graph with rows in the given order of store ids."""
    row_of_id = {kind: csr.inverse_permutation(ids) for kind, ids in order.items()}
    whole = LocalView.of_graph(graph)
    nodes = {
        kind: NodeRows(order[kind], rows.num_dst, selected_degrees(rows.degree, order[kind]))
        for kind, rows in whole.nodes.items()
    }
    relations = {
        kind: _relation(edges, row_of_id[kind.src], row_of_id[kind.dst]) for kind, edges in graph.edges.items()
    }
    return LocalView(nodes, relations)


def limit_destinations(view: LocalView, kind: str, count: int) -> LocalView:
    """Keep the first ``count`` rows of one type as destinations and all sources, without copying."""
    nodes = {name: replace(rows, num_dst=count) if name == kind else rows for name, rows in view.nodes.items()}
    relations = {}
    for edge_type, relation in view.relations.items():
        cut = relation.structure
        stop = int(cut.indptr[count]) if edge_type.dst == kind else cut.num_edges
        rows = count if edge_type.dst == kind else cut.num_rows
        structure = csr.CSR(cut.indptr[: rows + 1], cut.col[:stop], cut.num_cols)
        relations[edge_type] = relation.select(structure, slice(stop))
    return replace(view, nodes=nodes, relations=relations)


def _relation(edges: Edges, src_rows: Tensor, dst_rows: Tensor) -> LocalEdges:
    index = edges.src.dtype
    src, dst = src_rows.to(index)[edges.src.long()], dst_rows.to(index)[edges.dst().long()]
    indptr, edge, src = csr.sort_into_rows(src, dst, num_src=len(src_rows), num_dst=len(dst_rows))
    return LocalEdges(
        csr.CSR(indptr, src, len(src_rows)),
        edge,
        None if edges.weight is None else edges.weight[edge],
        None if edges.attr is None else edges.attr[edge],
        is_store_order=False,
    )
