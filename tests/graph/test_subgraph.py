"""Induced graphs: the edges among some nodes, as a view of them has them, and the whole graph is its own."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph import subgraph
from gnnfleet.graph.subgraph import induced_subgraph
from tests.equivalence.spread import plain_graph, typed_graph
from tests.graph.induced_view import induced_view


@pytest.mark.parametrize("edges_at_once", [3, 1 << 20])
@pytest.mark.parametrize("make", [plain_graph, typed_graph])
def test_a_subgraph_has_the_edges_of_an_induced_view(
    make: object, edges_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subgraph, "EDGES_AT_ONCE", edges_at_once)
    graph = make()  # type: ignore[operator]
    random = torch.Generator().manual_seed(1)
    ids = {
        kind: (torch.rand(table.count, generator=random) < 0.6).nonzero()[:, 0] for kind, table in graph.nodes.items()
    }
    induced, view = induced_subgraph(graph, ids), induced_view(graph, ids)
    for kind, table in induced.nodes.items():
        original = graph.nodes[kind]
        for rows, all_rows in ((table.x, original.x), (table.y, original.y)):
            assert (rows is None) == (all_rows is None)
            assert rows is None or torch.equal(rows, all_rows[ids[kind]])
        assert table.split is None or torch.equal(table.split, original.split[:, ids[kind]])
    for kind, edges in induced.edges.items():
        relation = view.relations[kind]
        assert torch.equal(edges.indptr, relation.structure.indptr)
        assert torch.equal(edges.src.long(), relation.structure.col.long())
        for data, expected in ((edges.weight, relation.weight), (edges.attr, relation.attr)):
            assert (data is None) == (expected is None)
            assert data is None or torch.equal(data, expected)


def test_the_subgraph_of_all_nodes_is_the_graph() -> None:
    graph = plain_graph()
    induced = induced_subgraph(graph, {"node": torch.arange(graph.num_nodes)})
    assert torch.equal(induced.single_edges.indptr, graph.single_edges.indptr)
    assert torch.equal(induced.single_edges.src, graph.single_edges.src)
    nothing = induced_subgraph(graph, {})
    assert nothing.num_nodes == nothing.num_edges == 0
    with pytest.raises(InputError, match="ascending store ids"):
        induced_subgraph(graph, {"node": torch.tensor([2, 1])})
