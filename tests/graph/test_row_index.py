"""Laws of row lookup by store id: any order of rows, any ids, every kind of view, deterministic gradients."""

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
from tests.graph.induced_view import induced_view
from tests.graph.strategies import graphs


def check_gather_rows(view: LocalView, num_rows: int, seed: int) -> None:
    """Compare ``gather_rows`` with a linear search, forward and backward, for random ids with repeats."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 3, dtype=torch.float64, generator=random, requires_grad=True)
    ids = view.node_ids[:num_rows]
    requested = ids[torch.randint(0, num_rows, (2 * num_rows,), generator=random)] if num_rows else ids
    rows = torch.tensor([ids.tolist().index(i) for i in requested.tolist()], dtype=torch.int64)
    gathered = view.gather_rows(x, requested)
    assert torch.equal(gathered, x[rows])
    grad_out = torch.randn(gathered.shape, dtype=torch.float64, generator=random)
    (grad,) = torch.autograd.grad(gathered, x, grad_out)
    torch.testing.assert_close(grad, torch.zeros_like(x).index_add(0, rows, grad_out))
    for missing in (-1, *range(int(ids.max()) + 2 if num_rows else 1)):
        if missing not in ids.tolist():
            with pytest.raises(InputError, match=f"node {missing} is not in this view"):
                view.gather_rows(x, torch.tensor([*requested.tolist(), missing]))


@given(graph=graphs(hetero=False), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_rows_of_whole_graphs_are_gathered_in_any_order(graph: Graph, seed: int) -> None:
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(seed))
    view = reordered_view(graph, {"node": order})
    check_gather_rows(LocalView.of_graph(graph), graph.num_nodes, seed)
    check_gather_rows(view, graph.num_nodes, seed)
    count = graph.num_nodes // 2
    check_gather_rows(limit_destinations(view, "node", count), count, seed)  # x has rows of destinations only


@given(graph=graphs(hetero=False), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_rows_of_subgraphs_and_blocks_are_gathered(graph: Graph, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    selected = (torch.rand(graph.num_nodes, generator=random) < 0.6).nonzero()[:, 0]
    check_gather_rows(induced_view(graph, {"node": selected}), len(selected), seed)
    view = reordered_view(graph, {"node": torch.randperm(graph.num_nodes, generator=random)})
    low, high = sorted(torch.randint(0, graph.num_nodes + 1, (2,), generator=random).tolist())
    block = full_block(view, {"node": (low, high)})
    check_gather_rows(block.view, block.view.num_src, seed)


def test_cluster_order_gathers_the_same_rows_as_store_order() -> None:
    graph = Graph(torch.randint(0, 900, (2, 4000)), num_nodes=900)
    order = cluster_order(graph)["node"]
    assert not torch.equal(order, torch.arange(900))
    x, ids = torch.randn(900, 4), torch.randint(0, 900, (50,))
    assert torch.equal(reordered_view(graph, {"node": order}).gather_rows(x[order], ids), x[ids])


@given(
    ids=st.lists(st.integers(0, 10**12), unique=True, max_size=30),
    positions=st.lists(st.integers(0, 40), max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_rows_of_sparse_ids_are_found(ids: list[int], positions: list[int]) -> None:
    index = RowIndex(torch.tensor(ids, dtype=torch.int64))
    requested = [ids[i % len(ids)] for i in positions] if ids else []
    assert index.rows(torch.tensor(requested, dtype=torch.int64)).tolist() == [ids.index(i) for i in requested]
    missing = next(i for i in range(10**12) if i not in ids)
    with pytest.raises(InputError, match="not in this view"):
        index.rows(torch.tensor([missing]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(50,), (50, 0), (50, 3), (50, 2, 3)])
def test_take_rows_keeps_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, rows = torch.randn(shape).mul(9).to(dtype), torch.randint(0, 50, (70,))
    assert torch.equal(take_rows(x, rows), x[rows]) and take_rows(x, rows).dtype == dtype


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    x, rows = torch.randn(20, 64, requires_grad=True), torch.randint(0, 20, (50_000,))
    grad_out = torch.randn(50_000, 64)
    grads = []
    before = torch.get_num_threads()
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        grads.append(torch.autograd.grad(take_rows(x, rows), x, grad_out)[0])
    torch.set_num_threads(before)
    assert all(torch.equal(grads[0], grad) for grad in grads)


@pytest.mark.parametrize("ids", [torch.tensor([0.5]), torch.tensor([[1]]), torch.tensor([True])])
def test_ids_that_are_no_whole_numbers_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match="whole numbers"):
        RowIndex(torch.arange(4)).rows(ids)
