"""Small random graphs like a large one: for lazy parameters, and for the self-check of a module."""

from __future__ import annotations

import torch

from gnnfleet.graph.graph import Graph, validated_edges, validated_nodes

NODES, ISOLATED = 40, 6  # of each node type; the last nodes are isolated
_EDGES = 160


def random_graph_like(graph: Graph) -> Graph:
    """A random graph of the same types and widths, with self-loops and parallel edges."""
    random, ends = torch.Generator().manual_seed(0), NODES - ISOLATED
    nodes = {}
    for kind, table in graph.nodes.items():
        x = torch.randn(NODES, 0 if table.x is None else int(table.x.shape[1]), generator=random)
        nodes[kind] = validated_nodes(NODES, x=x, y=None if table.y is None else torch.zeros(NODES, dtype=torch.int64))
    edges = {}
    for edge_type, like in graph.edges.items():
        index = torch.randint(0, ends, (2, _EDGES), generator=random)
        loops = torch.arange(0, ends, 5 if edge_type.src == edge_type.dst else ends).repeat(2, 1)
        index = torch.cat([index, index[:, :20], loops], 1)
        count = index.shape[1]
        weight = None if like.weight is None else torch.rand(count, generator=random) + 0.1
        attr = None if like.attr is None else torch.randn(count, like.attr.shape[1], generator=random)
        edges[edge_type] = validated_edges(index, num_src=NODES, num_dst=NODES, weight=weight, attr=attr)
    return Graph.of(nodes, edges)
