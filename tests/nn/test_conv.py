"""Every layer against torch_geometric with the same weights: output, gradient of x and of every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from gnnfleet.graph.graph import EdgeType, Graph, make_edges, make_nodes
from gnnfleet.graph.view import LocalView
from gnnfleet.nn.conv import GATConv, GATv2Conv, GCN2Conv, GCNConv, GINConv, RGCNConv, SAGEConv
from gnnfleet.nn.linear import Mlp

N, E, IN, OUT = 30, 150, 6, 5


def graph_of(*, loops: bool = False, weighted: bool = False) -> Graph:
    random = torch.Generator().manual_seed(0)
    index = torch.randint(0, N - 2, (2, E), generator=random)  # the last two nodes are isolated
    if not loops:
        index = index[:, index[0] != index[1]]
    count = index.shape[1]
    return Graph(
        index,
        num_nodes=N,
        edge_weight=torch.rand(count, generator=random) + 0.1 if weighted else None,
        edge_attr=torch.randn(count, 3, generator=random),
    )


def compare(
    ours: nn.Module,
    theirs: nn.Module,
    run: Callable[[nn.Module], Tensor],
    run_pyg: Callable[[nn.Module], Tensor],
    x: Tensor,
) -> None:
    """Same keys, same output, same gradients."""
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    theirs.load_state_dict(ours.state_dict())
    out, expected = run(ours), run_pyg(theirs)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    named = [(k, p) for k, p in ours.named_parameters() if p.requires_grad]
    other = dict(theirs.named_parameters())
    got = torch.autograd.grad(out, [x, *(p for _, p in named)], grad)
    wanted = torch.autograd.grad(expected, [x, *(other[k] for k, _ in named)], grad)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "gcn narrow": (lambda: GCNConv(IN, 3), lambda: pyg.GCNConv(IN, 3)),
    "gcn wide": (lambda: GCNConv(IN, 9), lambda: pyg.GCNConv(IN, 9)),
    "sage mean narrow": (lambda: SAGEConv(IN, 3), lambda: pyg.SAGEConv(IN, 3)),
    "sage mean wide": (lambda: SAGEConv(IN, 9), lambda: pyg.SAGEConv(IN, 9)),
    "sage max": (lambda: SAGEConv(IN, OUT, "max"), lambda: pyg.SAGEConv(IN, OUT, aggr="max")),
    "sage sum": (lambda: SAGEConv(IN, OUT, "sum"), lambda: pyg.SAGEConv(IN, OUT, aggr="sum")),
    "sage pool": (lambda: SAGEConv(IN, OUT, "max", project=True), lambda: pyg.SAGEConv(IN, OUT, "max", project=True)),
    "gin": (
        lambda: GINConv(Mlp(IN, OUT), eps=0.3, train_eps=True),
        lambda: pyg.GINConv(pyg.MLP([IN, OUT, OUT], norm=None), eps=0.3, train_eps=True),
    ),
    "gat": (lambda: GATConv(IN, OUT, 2), lambda: pyg.GATConv(IN, OUT, heads=2)),
    "gat averaged": (
        lambda: GATConv(IN, OUT, 3, concat=False, residual=True),
        lambda: pyg.GATConv(IN, OUT, heads=3, concat=False, residual=True),
    ),
    "gatv2": (lambda: GATv2Conv(IN, OUT, 2), lambda: pyg.GATv2Conv(IN, OUT, heads=2)),
    "gatv2 averaged": (
        lambda: GATv2Conv(IN, OUT, 3, concat=False, residual=True),
        lambda: pyg.GATv2Conv(IN, OUT, heads=3, concat=False, residual=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loops", [False, True])
def test_equals_pyg(name: str, loops: bool) -> None:
    if loops and name.startswith("gcn"):
        pytest.skip("parallel self-loops: PyG keeps one by position, we replace all by one")
    torch.manual_seed(0)
    graph = graph_of(loops=loops)
    view, index = LocalView.whole(graph), graph.only_edges.edge_index()
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    ours, theirs = (make().double() for make in CASES[name])
    compare(ours, theirs, lambda m: m(view, x), lambda m: m(x, index), x)


def test_gcn_with_edge_weights_equals_pyg() -> None:
    graph = graph_of(weighted=True)
    view, edges = LocalView.whole(graph), graph.only_edges
    assert edges.weight is not None
    weight = edges.weight
    x = torch.randn(N, IN, requires_grad=True)
    ours, theirs = GCNConv(IN, OUT), pyg.GCNConv(IN, OUT)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(
        ours(view, x, weight=weight), theirs(x, edges.edge_index(), weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("kind", "peer"), [(GATConv, pyg.GATConv), (GATv2Conv, pyg.GATv2Conv)])
def test_attention_with_edge_features_equals_pyg(kind: Any, peer: Any) -> None:
    graph = graph_of()
    view, edges = LocalView.whole(graph), graph.only_edges
    assert edges.attr is not None
    attr = edges.attr.double()
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    ours, theirs = kind(IN, OUT, 2, edge_dim=3).double(), peer(IN, OUT, heads=2, edge_dim=3).double()
    compare(ours, theirs, lambda m: m(view, x, edge_attr=attr), lambda m: m(x, edges.edge_index(), attr), x)


@pytest.mark.parametrize("shared", [True, False])
def test_gcn2_equals_pyg(shared: bool) -> None:
    graph = graph_of()
    view, index = LocalView.whole(graph), graph.only_edges.edge_index()
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    first = torch.randn(N, IN, dtype=torch.float64)
    ours, theirs = (k(IN, 0.2, 0.5, 3, shared).double() for k in (GCN2Conv, pyg.GCN2Conv))
    compare(ours, theirs, lambda m: m(view, x, first), lambda m: m(x, first, index), x)


@pytest.mark.parametrize("bases", [None, 2])
def test_rgcn_equals_pyg(bases: int | None) -> None:
    graph = graph_of()
    index = graph.only_edges.edge_index()
    kind = torch.randint(0, 3, (index.shape[1],), generator=torch.Generator().manual_seed(2))
    kind = kind.sort().values
    edges = {EdgeType("node", f"r{r}", "node"): make_edges(index[:, kind == r], num_src=N, num_dst=N) for r in range(3)}
    view = LocalView.whole(Graph.of({"node": make_nodes(N)}, edges))
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    ours, theirs = RGCNConv(IN, OUT, 3, bases).double(), pyg.RGCNConv(IN, OUT, 3, bases).double()
    compare(ours, theirs, lambda m: m(view, {"node": x})["node"], lambda m: m(x, index, kind), x)


def test_precomputed_aggregates_change_nothing() -> None:
    view = LocalView.whole(graph_of())
    x = torch.randn(N, IN)
    for conv in (GCNConv(IN, 3), SAGEConv(IN, 3), SAGEConv(IN, 9, "max"), GINConv(Mlp(IN, OUT))):
        torch.testing.assert_close(
            conv(view, x, gathered=conv.precompute(view, x)), conv(view, x), rtol=1e-5, atol=1e-5
        )
