"""Rows learnt for nodes: the same first numbers whoever holds them, found by store id in any view."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.embedding import NodeEmbedding, embedding_ids
from gnnfleet.ops.draws import Draws, Purpose


def made(ids: torch.Tensor | None, width: int = 5) -> NodeEmbedding:
    torch.manual_seed(3)
    return NodeEmbedding(60, width, ids=ids)


@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_rank_begins_with_the_rows_of_its_nodes(width: int) -> None:
    ids = torch.tensor([7, 59, 0, 31])
    whole, some = made(None, width), made(ids, width)
    assert torch.equal(some.weight, whole.weight[ids])
    assert embedding_ids(torch.nn.ModuleDict({"rows": some, "all": whole})) == {"rows.weight": ids}


def test_views_find_their_rows() -> None:
    graph = make_dataset("communities", nodes=60, mean_degree=4)
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    whole, turned = made(None), made(ids)
    for view in (LocalView.of_graph(graph), LocalView.induced(graph, {"node": torch.tensor([3, 20, 21, 58])})):
        out = turned(view)
        assert torch.equal(out, whole.weight[view.node_ids]) and torch.equal(out, whole(view))
        (out * view.node_ids[:, None]).sum().backward()
    expected = torch.arange(60.0)
    expected[[3, 20, 21, 58]] *= 2
    assert torch.equal(turned.weight.grad, expected[ids][:, None].expand(-1, 5))


def test_normal_draws() -> None:
    draws = Draws(11, Purpose.PARAMETERS)
    ids = torch.arange(40_000)
    found = draws.normals_at(ids, 3)
    assert found.shape == (40_000, 3) and torch.equal(draws.normals_at(ids[500:600].flip(0), 3), found[500:600].flip(0))
    assert abs(float(found.mean())) < 0.01 and abs(float(found.var()) - 1) < 0.02
    inside = float((found.abs() < 1).double().mean())
    assert abs(inside - 0.6827) < 0.005, "as many within one deviation as a normal has"
    assert float(torch.corrcoef(found.T)[0, 1].abs()) < 0.02
