"""Random small graphs for hypothesis: empty, isolated nodes, self-loops, parallel edges, several types."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.sampling.sampler import Fanouts, NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 12, max_edges: int = 40, hetero: bool | None = None) -> Graph:
    several = draw(st.booleans()) if hetero is None else hetero
    kinds = ("a", "b") if several else ("node",)
    seed = draw(st.integers(0, 2**20))
    random = torch.Generator().manual_seed(seed)
    nodes = {}
    for kind in kinds:
        count = draw(st.integers(0, max_nodes))
        nodes[kind] = validated_nodes(
            count,
            x=torch.randn(count, 3, generator=random),
            y=torch.randint(-1, 3, (count,), generator=random),
            split=torch.randint(-1, 3, (count,), generator=random),
        )
    edge_types = (
        [EdgeType("a", "to", "b"), EdgeType("b", "back", "a"), EdgeType("a", "like", "a"), EdgeType("a", "hate", "a")]
        if several
        else [EdgeType("node", "to", "node")]
    )
    edges = {}
    for kind in edge_types:
        num_src, num_dst = nodes[kind.src].count, nodes[kind.dst].count
        count = draw(st.integers(0, max_edges)) if num_src and num_dst else 0
        index = torch.stack([torch.randint(0, max(num, 1), (count,), generator=random) for num in (num_src, num_dst)])
        data = draw(st.booleans())
        edges[kind] = validated_edges(
            index,
            num_src=num_src,
            num_dst=num_dst,
            weight=torch.rand(count, generator=random) if data else None,
            attr=torch.randn(count, 2, generator=random) if data else None,
            time=torch.randint(0, 9, (count,), generator=random) if data else None,
        )
    return Graph.of(nodes, edges)


def sample_blocks(
    graph: Graph, seeds: Mapping[str, Tensor], fanouts: Fanouts, key: DrawKey, **options: bool
) -> list[LocalView]:
    """The blocks of one batch."""
    return NeighborSampler(graph, fanouts, **options).blocks(seeds, key)
