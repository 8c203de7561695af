from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.order import cluster_places
from gnnfleet.graph.scan import EdgeScan
from tests.graph.strategies import graphs


@given(graph=graphs())
@settings(max_examples=30, deadline=None)
def test_every_node_has_one_place_and_the_seed_decides(graph: Graph) -> None:
    scan = EdgeScan(graph)
    place = cluster_places(scan, seed=1)
    assert sorted(place.tolist()) == list(range(graph.num_nodes))
    assert np.array_equal(place, cluster_places(scan, seed=1))


def test_neighbours_come_close() -> None:
    """Forty cliques of fifty nodes, shuffled: the ends of an edge were 700 places apart on average."""
    random = torch.Generator().manual_seed(0)
    name = torch.randperm(2000, generator=random)
    base = torch.arange(2000) // 50 * 50
    index = torch.stack(
        [torch.arange(2000).repeat(20), (base + torch.randint(0, 50, (20, 2000), generator=random)).flatten()]
    )
    graph = Graph(name[index], num_nodes=2000)
    place = torch.from_numpy(cluster_places(EdgeScan(graph)))
    apart = (place[name[index[0]]] - place[name[index[1]]]).abs().float()
    assert float(apart.mean()) < 60
