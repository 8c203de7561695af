"""Node embeddings: initial rows do not depend on sharding, and views look rows up by store id."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.embedding import NodeEmbedding, embedding_ids
from gnnfleet.ops.draws import Draws, Purpose
from tests.graph.induced_view import induced_view


def embedding(ids: torch.Tensor | None, width: int = 5) -> NodeEmbedding:
    torch.manual_seed(3)
    return NodeEmbedding(60, width, ids=ids)


@pytest.mark.parametrize("width", [1, 4, 5])
def test_initial_rows_of_a_shard_equal_those_of_the_whole_table(width: int) -> None:
    ids = torch.tensor([7, 59, 0, 31])
    whole, some = embedding(None, width), embedding(ids, width)
    assert torch.equal(some.weight, whole.weight[ids])
    assert embedding_ids(torch.nn.ModuleDict({"rows": some, "all": whole})) == {"rows.weight": ids}


def test_views_look_up_rows_by_store_id() -> None:
    graph = make_dataset("communities", nodes=60, mean_degree=4)
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    whole, permuted = embedding(None), embedding(ids)
    for view in (LocalView.of_graph(graph), induced_view(graph, {"node": torch.tensor([3, 20, 21, 58])})):
        out = permuted(view)
        assert torch.equal(out, whole.weight[view.node_ids]) and torch.equal(out, whole(view))
        (out * view.node_ids[:, None]).sum().backward()
    expected = torch.arange(60.0)
    expected[[3, 20, 21, 58]] *= 2
    assert torch.equal(permuted.weight.grad, expected[ids][:, None].expand(-1, 5))


def test_draws_are_standard_normal() -> None:
    draws = Draws(11, Purpose.PARAMETERS)
    ids = torch.arange(40_000)
    normals = draws.normals_at(ids, 3)
    assert normals.shape == (40_000, 3) and torch.equal(
        draws.normals_at(ids[500:600].flip(0), 3), normals[500:600].flip(0)
    )
    assert abs(float(normals.mean())) < 0.01 and abs(float(normals.var()) - 1) < 0.02
    inside = float((normals.abs() < 1).double().mean())
    assert abs(inside - 0.6827) < 0.005, "as many within one deviation as a normal has"
    assert float(torch.corrcoef(normals.T)[0, 1].abs()) < 0.02
