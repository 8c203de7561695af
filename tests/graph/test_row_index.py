"""Rows by store id: any order of rows, any ids, whole graphs, subgraphs and blocks; gradients in one order of sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import InputError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.reorder import cluster_order, limit_destinations, reordered_view
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.row_index import RowIndex, take_rows
from tests.graph.strategies import graphs


def assert_takes(view: LocalView, rows: int, seed: int) -> None:
    """take equals a search by hand, forward and backward, for ids drawn with repeats."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=draw, requires_grad=True)
    ids = view.node_ids[:rows]
    asked = ids[torch.randint(0, rows, (2 * rows,), generator=draw)] if rows else ids
    by_hand = torch.tensor([ids.tolist().index(i) for i in asked.tolist()], dtype=torch.int64)
    found = view.gather_rows(x, asked)
    assert torch.equal(found, x[by_hand])
    pull = torch.randn(found.shape, dtype=torch.float64, generator=draw)
    (grad,) = torch.autograd.grad(found, x, pull)
    torch.testing.assert_close(grad, torch.zeros_like(x).index_add(0, by_hand, pull))
    absent = [i for i in (-1, *range(int(ids.max()) + 2 if rows else 1)) if i not in ids.tolist()]
    for stranger in absent:
        with pytest.raises(InputError, match=f"node {stranger} is not in this view"):
            view.gather_rows(x, torch.tensor([*asked.tolist(), stranger]))


@given(graph=graphs(hetero=False), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_whole_graphs_in_any_order(graph: Graph, seed: int) -> None:
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(seed))
    view = reordered_view(graph, {"node": order})
    assert_takes(LocalView.of_graph(graph), graph.num_nodes, seed)
    assert_takes(view, graph.num_nodes, seed)
    some = graph.num_nodes // 2
    assert_takes(limit_destinations(view, "node", some), some, seed)  # x of the destinations alone


@given(graph=graphs(hetero=False), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_subgraphs_and_blocks(graph: Graph, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    picked = (torch.rand(graph.num_nodes, generator=draw) < 0.6).nonzero()[:, 0]
    induced = LocalView.induced(graph, {"node": picked})
    assert_takes(induced, len(picked), seed)
    whole = reordered_view(graph, {"node": torch.randperm(graph.num_nodes, generator=draw)})
    low, high = sorted(torch.randint(0, graph.num_nodes + 1, (2,), generator=draw).tolist())
    block = full_block(whole, {"node": (low, high)})
    assert_takes(block.view, block.view.num_src, seed)


def test_cluster_order_takes_the_same_rows_as_store_order() -> None:
    graph = Graph(torch.randint(0, 900, (2, 4000)), num_nodes=900)
    order = cluster_order(graph)["node"]
    assert not torch.equal(order, torch.arange(900))
    x, ids = torch.randn(900, 4), torch.randint(0, 900, (50,))
    assert torch.equal(reordered_view(graph, {"node": order}).gather_rows(x[order], ids), x[ids])


@given(
    ids=st.lists(st.integers(0, 10**12), unique=True, max_size=30),
    asked=st.lists(st.integers(0, 40), max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_sparse_ids_are_searched_for(ids: list[int], asked: list[int]) -> None:
    places = RowIndex(torch.tensor(ids, dtype=torch.int64))
    wanted = [ids[i % len(ids)] for i in asked] if ids else []
    assert places.rows(torch.tensor(wanted, dtype=torch.int64)).tolist() == [ids.index(i) for i in wanted]
    stranger = next(i for i in range(10**12) if i not in ids)
    with pytest.raises(InputError, match="not in this view"):
        places.rows(torch.tensor([stranger]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(50,), (50, 0), (50, 3), (50, 2, 3)])
def test_rows_of_any_shape_keep_their_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, rows = torch.randn(shape).mul(9).to(dtype), torch.randint(0, 50, (70,))
    assert torch.equal(take_rows(x, rows), x[rows]) and take_rows(x, rows).dtype == dtype


def test_gradients_have_the_same_bits_every_time() -> None:
    x, rows = torch.randn(20, 64, requires_grad=True), torch.randint(0, 20, (50_000,))
    pull = torch.randn(50_000, 64)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        found.append(torch.autograd.grad(take_rows(x, rows), x, pull)[0])
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("ids", [torch.tensor([0.5]), torch.tensor([[1]]), torch.tensor([True])])
def test_ids_are_whole_numbers(ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match="whole numbers"):
        RowIndex(torch.arange(4)).rows(ids)
