"""Induced graphs: the edges among some nodes, as LocalView.induced finds them, and the whole graph is its own."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph import subgraph
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.graph.views.local import LocalView
from tests.equivalence.spread import plain_graph, typed_graph


@pytest.mark.parametrize("piece", [3, 1 << 20])
@pytest.mark.parametrize("make", [plain_graph, typed_graph])
def test_the_same_edges_as_a_view(make: object, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgraph, "EDGES_AT_ONCE", piece)
    graph = make()  # type: ignore[operator]
    random = torch.Generator().manual_seed(1)
    ids = {
        kind: (torch.rand(table.count, generator=random) < 0.6).nonzero()[:, 0] for kind, table in graph.nodes.items()
    }
    found, view = induced_subgraph(graph, ids), LocalView.induced(graph, ids)
    for kind, table in found.nodes.items():
        whole = graph.nodes[kind]
        for one, other in ((table.x, whole.x), (table.y, whole.y)):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other[ids[kind]])
        assert table.split is None or torch.equal(table.split, whole.split[:, ids[kind]])
    for kind, edges in found.edges.items():
        relation = view.relations[kind]
        assert torch.equal(edges.indptr, relation.structure.indptr)
        assert torch.equal(edges.src.long(), relation.structure.col.long())
        for one, other in ((edges.weight, relation.weight), (edges.attr, relation.attr)):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_all_nodes_are_the_graph_itself() -> None:
    graph = plain_graph()
    found = induced_subgraph(graph, {"node": torch.arange(graph.num_nodes)})
    assert torch.equal(found.single_edges.indptr, graph.single_edges.indptr)
    assert torch.equal(found.single_edges.src, graph.single_edges.src)
    nothing = induced_subgraph(graph, {})
    assert nothing.num_nodes == nothing.num_edges == 0
    with pytest.raises(InputError, match="ascending store ids"):
        induced_subgraph(graph, {"node": torch.tensor([2, 1])})
