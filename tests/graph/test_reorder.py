from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.graph.edge_keys import select_edges
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.edge_scan import EdgeScan
from gnnfleet.graph.reorder import cluster_positions, limit_destinations, reordered_view
from gnnfleet.graph.sampling.sampler import sample_blocks
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.ops.draws import DrawKey
from tests.graph.strategies import graphs


@given(graph=graphs())
@settings(max_examples=30, deadline=None)
def test_every_node_has_one_place_and_the_seed_decides(graph: Graph) -> None:
    scan = EdgeScan(graph)
    place = cluster_positions(scan, seed=1)
    assert sorted(place.tolist()) == list(range(graph.num_nodes))
    assert np.array_equal(place, cluster_positions(scan, seed=1))


def test_neighbours_come_close() -> None:
    """Forty cliques of fifty nodes, shuffled: the ends of an edge were 700 places apart on average."""
    random = torch.Generator().manual_seed(0)
    name = torch.randperm(2000, generator=random)
    base = torch.arange(2000) // 50 * 50
    index = torch.stack(
        [torch.arange(2000).repeat(20), (base + torch.randint(0, 50, (20, 2000), generator=random)).flatten()]
    )
    graph = Graph(name[index], num_nodes=2000)
    place = torch.from_numpy(cluster_positions(EdgeScan(graph)))
    apart = (place[name[index[0]]] - place[name[index[1]]]).abs().float()
    assert float(apart.mean()) < 60


def drawn_order(graph: Graph, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {kind: torch.randperm(table.count, generator=random) for kind, table in graph.nodes.items()}


@pytest.mark.parametrize("loops", [False, True])
@given(graph=graphs(hetero=False), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_no_order_of_rows_decides_between_equal_maxima(graph: Graph, seed: int, loops: bool) -> None:
    """The lowest store edge id does, also in a prefix of the rows and in a block of them."""
    order = drawn_order(graph, seed)
    ids = order["node"]
    count = graph.num_nodes // 2
    ordered = reordered_view(graph, order)
    block = full_block(ordered, {"node": (0, count)})
    x = torch.randint(0, 2, (graph.num_nodes, 3), generator=torch.Generator().manual_seed(seed)).double()
    grad = torch.randint(-9, 9, x.shape, generator=torch.Generator().manual_seed(seed)).double()
    kept = torch.zeros_like(grad)
    kept[ids[:count]] = grad[ids[:count]]
    whole = LocalView.of_graph(graph)
    for view, rows, pushed in (
        (ordered, ids, grad),
        (limit_destinations(ordered, "node", count), ids, kept),
        (block.view, ids[block.rows["node"]], kept),
    ):
        for verb in _maxima(loops):
            expected, mine = x.clone().requires_grad_(), x[rows].requires_grad_()
            wanted, found = verb(whole, expected), verb(view, mine)
            assert torch.equal(found, wanted[rows[: view.num_dst]])
            wanted.backward(pushed)
            found.backward(pushed[rows[: view.num_dst]])
            assert expected.grad is not None and mine.grad is not None
            assert torch.equal(torch.zeros_like(x).index_copy(0, rows, mine.grad), expected.grad)


def _maxima(loops: bool):
    yield lambda view, x: view.aggregate(x, reduce="max", self_loops=loops)
    if not loops:
        yield lambda view, x: view.propagate(lambda src, dst, edge: src["x"], src={"x": x}, reduce="max")


@given(graph=graphs(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_relations_know_whether_they_are_in_store_order(graph: Graph, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    every = {kind: torch.arange(table.count) for kind, table in graph.nodes.items()}
    ordered, whole = reordered_view(graph, drawn_order(graph, seed)), LocalView.of_graph(graph)
    spans = {kind: (0, table.count // 2) for kind, table in graph.nodes.items()}
    views = [whole, LocalView.induced(graph, {kind: ids[::2] for kind, ids in every.items()})]
    views += [full_block(view, spans).view for view in (whole, ordered)]
    views += sample_blocks(graph, every, [2, -1], DrawKey(seed), replace=True)
    for relation in [relation for view in [*views, ordered] for relation in view.relations.values()]:
        kept = select_edges(relation, torch.rand(len(relation.edge_ids), generator=random) < 0.5)
        for one in (relation, kept):
            assert not one.is_store_order or ascending(one)
    assert all(relation.is_store_order for view in (*views[:3], *views[4:]) for relation in view.relations.values())
    assert not any(relation.is_store_order for relation in ordered.relations.values())


def ascending(relation: LocalEdges) -> bool:
    rows = relation.structure.row
    return bool((relation.edge_ids.diff()[rows.diff() == 0] >= 0).all())
