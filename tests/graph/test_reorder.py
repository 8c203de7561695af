"""Laws of reordered views: the order is a permutation, neighbours are close, results do not depend on the order."""

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
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.ops.draws import DrawKey
from tests.graph.induced_view import induced_view
from tests.graph.strategies import graphs, sample_blocks


@given(graph=graphs())
@settings(max_examples=30, deadline=None)
def test_positions_are_a_permutation_that_the_seed_determines(graph: Graph) -> None:
    scan = EdgeScan(graph)
    position = cluster_positions(scan, seed=1)
    assert sorted(position.tolist()) == list(range(graph.num_nodes))
    assert np.array_equal(position, cluster_positions(scan, seed=1))


def test_reordering_moves_neighbours_closer() -> None:
    """In forty shuffled cliques of fifty nodes, the ends of an edge are 700 positions apart on average."""
    random = torch.Generator().manual_seed(0)
    name = torch.randperm(2000, generator=random)
    base = torch.arange(2000) // 50 * 50
    index = torch.stack(
        [torch.arange(2000).repeat(20), (base + torch.randint(0, 50, (20, 2000), generator=random)).flatten()]
    )
    graph = Graph(name[index], num_nodes=2000)
    position = torch.from_numpy(cluster_positions(EdgeScan(graph)))
    distance = (position[name[index[0]]] - position[name[index[1]]]).abs().float()
    assert float(distance.mean()) < 60


def random_order(graph: Graph, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {kind: torch.randperm(table.count, generator=random) for kind, table in graph.nodes.items()}


@pytest.mark.parametrize("loops", [False, True])
@given(graph=graphs(hetero=False), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_lowest_store_edge_id_decides_between_equal_maxima(graph: Graph, seed: int, loops: bool) -> None:
    """The order of rows does not matter, also with a prefix of the rows as destinations and in a block."""
    order = random_order(graph, seed)
    ids = order["node"]
    count = graph.num_nodes // 2
    ordered = reordered_view(graph, order)
    block = full_block(ordered, {"node": (0, count)})
    x = torch.randint(0, 2, (graph.num_nodes, 3), generator=torch.Generator().manual_seed(seed)).double()
    grad = torch.randint(-9, 9, x.shape, generator=torch.Generator().manual_seed(seed)).double()
    partial_grad = torch.zeros_like(grad)
    partial_grad[ids[:count]] = grad[ids[:count]]
    store_view = LocalView.of_graph(graph)
    for view, rows, grad_out in (
        (ordered, ids, grad),
        (limit_destinations(ordered, "node", count), ids, partial_grad),
        (block.view, ids[block.rows["node"]], partial_grad),
    ):
        for verb in _max_verbs(loops):
            store_x, view_x = x.clone().requires_grad_(), x[rows].requires_grad_()
            expected, actual = verb(store_view, store_x), verb(view, view_x)
            assert torch.equal(actual, expected[rows[: view.num_dst]])
            expected.backward(grad_out)
            actual.backward(grad_out[rows[: view.num_dst]])
            assert store_x.grad is not None and view_x.grad is not None
            assert torch.equal(torch.zeros_like(x).index_copy(0, rows, view_x.grad), store_x.grad)


def _max_verbs(loops: bool):
    yield lambda view, x: view.aggregate(x, reduce="max", self_loops=loops)
    if not loops:
        yield lambda view, x: view.propagate(lambda src, dst, edge: src["x"], src={"x": x}, reduce="max")


@given(graph=graphs(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_edges_marked_as_store_order_ascend_in_every_row(graph: Graph, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    all_ids = {kind: torch.arange(table.count) for kind, table in graph.nodes.items()}
    ordered, store_view = reordered_view(graph, random_order(graph, seed)), LocalView.of_graph(graph)
    spans = {kind: (0, table.count // 2) for kind, table in graph.nodes.items()}
    views = [store_view, induced_view(graph, {kind: ids[::2] for kind, ids in all_ids.items()})]
    views += [full_block(view, spans).view for view in (store_view, ordered)]
    views += sample_blocks(graph, all_ids, [2, -1], DrawKey(seed), replace=True)
    for relation in [relation for view in [*views, ordered] for relation in view.relations.values()]:
        selected = select_edges(relation, torch.rand(len(relation.edge_ids), generator=random) < 0.5)
        for edges in (relation, selected):
            assert not edges.is_store_order or ascending(edges)
    assert all(relation.is_store_order for view in (*views[:3], *views[4:]) for relation in view.relations.values())
    assert not any(relation.is_store_order for relation in ordered.relations.values())


def ascending(relation: LocalEdges) -> bool:
    rows = relation.structure.row
    return bool((relation.edge_ids.diff()[rows.diff() == 0] >= 0).all())
