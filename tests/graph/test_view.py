"""Laws of LocalView: verbs equal dense formulas, subgraphs have the edges inside, dropout goes by store id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.local import SELF_LOOP_IDS, LocalView
from gnnfleet.ops.draws import DrawKey
from tests.graph.induced_view import induced_view
from tests.graph.strategies import graphs


def dense(graph: Graph) -> torch.Tensor:
    """[N, N] number of edges j → i in row i, column j."""
    index = graph.single_edges.edge_index()
    out = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return out.index_put_((index[1], index[0]), torch.ones(index.shape[1], dtype=torch.float64), accumulate=True)


def with_loops(matrix: torch.Tensor) -> torch.Tensor:
    return matrix - matrix.diag().diag() + torch.eye(len(matrix), dtype=matrix.dtype)


@given(graph=graphs(hetero=False))
@settings(max_examples=40, deadline=None)
def test_aggregation_equals_the_product_with_the_adjacency_matrix(graph: Graph) -> None:
    view = LocalView.of_graph(graph)
    x = torch.randn(graph.num_nodes, 3, dtype=torch.float64)
    torch.testing.assert_close(view.aggregate(x), dense(graph) @ x)
    torch.testing.assert_close(view.aggregate(x, self_loops=True), with_loops(dense(graph)) @ x)
    loops = with_loops(dense(graph))
    torch.testing.assert_close(
        view.aggregate(x, reduce="mean", self_loops=True), loops @ x / loops.sum(1, keepdim=True)
    )
    torch.testing.assert_close(view.graph_degree(), (loops.sum(1) - 1).float())
    assert torch.equal(view.in_degree, dense(graph).sum(1).long())


@given(graph=graphs(hetero=False))
@settings(max_examples=30, deadline=None)
def test_attention_with_self_loops_equals_dense_softmax(graph: Graph) -> None:
    n, heads, width = graph.num_nodes, 2, 3
    view = LocalView.of_graph(graph)
    z = torch.randn(n, heads, width, dtype=torch.float64)
    left, right = torch.randn(2, n, heads, dtype=torch.float64)
    out = view.attend(z.flatten(1), src=left, dst=right, self_loops=True)
    score = torch.nn.functional.leaky_relu(left[None] + right[:, None], 0.2)  # [dst, src, H]
    weight = score.exp() * with_loops(dense(graph))[..., None]
    expected = torch.einsum("ijh,jhc->ihc", weight / weight.sum(1, keepdim=True), z)
    torch.testing.assert_close(out.view(n, heads, width), expected)


@given(graph=graphs(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_an_induced_subgraph_has_exactly_the_edges_inside(graph: Graph, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    selected = {k: (torch.rand(t.count, generator=random) < 0.6).nonzero()[:, 0] for k, t in graph.nodes.items()}
    view, graph_view = induced_view(graph, selected), LocalView.of_graph(graph)
    for kind, edges in graph.edges.items():
        index = edges.edge_index()
        inside = torch.isin(index[0], selected[kind.src]) & torch.isin(index[1], selected[kind.dst])
        relation = view.relations[kind]
        assert torch.equal(relation.edge_ids, inside.nonzero()[:, 0])
        rows, cols = relation.structure.row.long(), relation.structure.col.long()
        assert torch.equal(selected[kind.src][cols], index[0][inside])
        assert torch.equal(selected[kind.dst][rows], index[1][inside])
        for name in ("weight", "attr"):
            actual, stored = getattr(relation, name), getattr(edges, name)
            assert (actual is None) == (stored is None)
            assert actual is None or torch.equal(actual, stored[inside])
    for kind in graph.nodes:
        expected = graph_view.nodes[kind].degree(False)[selected[kind]]
        assert torch.equal(view.nodes[kind].degree(False), expected), "degrees are the view graph's"


def test_dropout_of_a_subgraph_equals_that_of_the_graph() -> None:
    graph = Graph(torch.randint(0, 40, (2, 200)), num_nodes=40)
    key = DrawKey(seed=1, epoch=2, step=3)
    view = LocalView.of_graph(graph).with_step(key=key, layer=1)
    ids = torch.arange(0, 40, 3)
    subgraph = induced_view(graph, {"node": ids}).with_step(key=key, layer=1)
    x = torch.randn(40, 5)
    assert torch.equal(subgraph.dropout(x[ids], 0.5), view.dropout(x, 0.5)[ids])
    assert not torch.equal(view.dropout(x, 0.5), view.with_step(layer=2).dropout(x, 0.5))
    assert not torch.equal(view.dropout(x, 0.5), view.dropout(x, 0.5, mask_id=1))
    assert view.with_step(training=False).dropout(x, 0.5) is x


def test_self_loops_have_weight_one_and_ids_above_all_edges() -> None:
    graph = Graph(torch.tensor([[0, 1, 1], [1, 1, 0]]), edge_weight=[2.0, 5.0, 3.0], num_nodes=3)
    view = LocalView.of_graph(graph)
    x = torch.eye(3)
    expected = torch.tensor([[1.0, 3, 0], [2, 1, 0], [0, 0, 1]])
    assert torch.equal(view.aggregate(x, weight=view.weight, self_loops=True), expected)
    assert torch.equal(view.graph_degree(weighted=True), torch.tensor([3.0, 2.0, 0.0]))
    assert graph.num_edges < SELF_LOOP_IDS


def test_gather_rows_of_a_subgraph_and_invalid_ids() -> None:
    graph = Graph(torch.randint(0, 10, (2, 20)), num_nodes=10)
    view = induced_view(graph, {"node": torch.tensor([1, 4, 7])})
    x = torch.randn(3, 2, requires_grad=True)
    rows = view.gather_rows(x, torch.tensor([7, 1, 7]))
    assert torch.equal(rows, x[[2, 0, 2]])
    rows.sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 0, 2]
    with pytest.raises(InputError, match="not in this view"):
        view.gather_rows(x, torch.tensor([2]))


@given(graph=graphs(hetero=True))
@settings(max_examples=20, deadline=None)
def test_edge_types_are_aggregated_separately(graph: Graph) -> None:
    view = LocalView.of_graph(graph)
    x = {kind: torch.randn(table.count, 2, dtype=torch.float64) for kind, table in graph.nodes.items()}
    for kind, out in view.aggregate_relations(x).items():
        index = graph.edges[kind].edge_index()
        expected = torch.zeros(graph.nodes[kind.dst].count, 2, dtype=torch.float64)
        torch.testing.assert_close(out, expected.index_add(0, index[1], x[kind.src][index[0]]))
    with pytest.raises(ConfigError, match="use rgcn"):
        view.aggregate(x["a"])
