"""Every layer against torch_geometric's: the same weights give the same rows and the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gnnfleet import nn
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from tests.nn.peers import DTYPES, block, compare, random_graph, tolerance

Peers = Callable[[int], tuple[torch.nn.Module, torch.nn.Module]]


def both(name: str, *args: Any, **settings: Any) -> Peers:
    """The same layer of both libraries with the same arguments; the input width comes first."""

    def make(width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        return getattr(nn, name)(width, *args, **settings), getattr(pyg, name)(width, *args, **settings)

    return make


def gin(**settings: Any) -> Peers:
    def make(width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        def perceptron() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(width, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))

        return nn.GINConv(perceptron(), **settings), pyg.GINConv(perceptron(), **settings)

    return make


def gcn_and_root(width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """GCN with a residual, which PyG's lacks, and its sum with a linear map."""

    class Sum(pyg.GCNConv):
        def __init__(self) -> None:
            super().__init__(width, 3)
            self.res = torch.nn.Linear(width, 3, bias=False)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return super().forward(x, index) + self.res(x)

    return nn.GCNConv(width, 3, residual=True), Sum()


PLAIN = {
    "gcn narrower": both("GCNConv", 3),
    "gcn wider": both("GCNConv", 8),
    "gcn no bias": both("GCNConv", 3, bias=False),
    "gcn residual": gcn_and_root,
    "sage mean narrower": both("SAGEConv", 3),
    "sage mean wider": both("SAGEConv", 8),
    "sage sum": both("SAGEConv", 3, aggr="sum"),
    "sage max": both("SAGEConv", 3, aggr="max"),
    "sage pool": both("SAGEConv", 4, aggr="max", project=True),
    "sage no root": both("SAGEConv", 3, root_weight=False, bias=False),
    "sage normalised": both("SAGEConv", 3, normalize=True),
    "gin": gin(),
    "gin learnt eps": gin(eps=0.3, train_eps=True),
    "gat": both("GATConv", 3, heads=2),
    "gat averaged": both("GATConv", 3, heads=2, concat=False, negative_slope=0.1),
    "gat residual": both("GATConv", 3, heads=2, residual=True),
    "gat residual, no bias": both("GATConv", 3, heads=2, residual=True, bias=False),
    "gat no loops": both("GATConv", 3, heads=2, add_self_loops=False),
    "gatv2": both("GATv2Conv", 3, heads=2),
    "gatv2 averaged": both("GATv2Conv", 3, heads=2, concat=False, bias=False),
    "gatv2 shared": both("GATv2Conv", 3, heads=2, share_weights=True, residual=True),
    "gen": both("GENConv", 5, norm="layer"),
    "gen wider, learnt temperature": both("GENConv", 6, norm="layer", learn_t=True, t=0.5, bias=True),
    "gen batch norm": both("GENConv", 5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_layer_equals_its_peer(name: str, loops: bool, dtype: torch.dtype) -> None:
    graph = random_graph(loops=loops)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = PLAIN[name](5)
    x = graph.single_nodes.x.to(dtype)
    ours.to(dtype)
    compare(ours, theirs, x, call_ours=lambda x: ours(view, x), call_theirs=lambda x: theirs(x, index))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["sage mean narrower", "sage mean wider", "sage max", "sage pool", "gin", "gatv2", "gat"]
)
def test_a_block_equals_the_peer_on_a_pair(name: str, dtype: torch.dtype) -> None:
    graph = random_graph()
    for num_dst in (4, 20):  # far and not so far fewer destinations than sources: the two orders of product and sum
        view, index = block(graph, num_dst)
        ours, theirs = PLAIN[name](5)
        x = graph.single_nodes.x.to(dtype)
        ours.to(dtype)
        compare(
            ours,
            theirs,
            x,
            call_ours=lambda x, ours=ours, view=view: ours(view, x),
            call_theirs=lambda x, theirs=theirs, index=index, n=num_dst: theirs((x, x[:n]), index),
        )


@pytest.mark.parametrize(
    "name", sorted(PLAIN.keys() - {"gen batch norm"})
)  # it has the statistics of the rows there are
def test_a_block_gives_the_first_rows_of_the_whole(name: str) -> None:
    graph = random_graph(loops=True)
    layer = PLAIN[name](5)[0].double()
    x = graph.single_nodes.x.double()
    whole = layer(LocalView.of_graph(graph), x)
    for num_dst in (0, 4, 20):
        torch.testing.assert_close(layer(block(graph, num_dst)[0], x), whole[:num_dst])


def weighted_graph(loops: str) -> Graph:
    """Edge weights, with no self-loops, with those of some nodes, or with parallel ones of different weights."""
    graph = random_graph(seed=4, loops=loops != "none")
    if loops != "parallel":
        return graph
    edges = graph.single_edges
    assert edges.weight is not None
    more = torch.arange(0, 24, 3).repeat_interleave(3).repeat(2, 1)
    weight = torch.cat([edges.weight, torch.randperm(more.shape[1], generator=torch.Generator().manual_seed(1)) / 7])
    return Graph(torch.cat([edges.edge_index(), more], 1), x=graph.single_nodes.x, num_nodes=30, edge_weight=weight)


@pytest.mark.parametrize("loops", ["none", "some", "parallel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "improved"), [(3, False), (8, True)])
def test_gcn_with_edge_weights_equals_its_peer(width: int, improved: bool, dtype: torch.dtype, loops: str) -> None:
    graph = weighted_graph(loops)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = both("GCNConv", width, improved=improved)(5)
    x = graph.single_nodes.x.to(dtype)
    ours.to(dtype)
    weight = graph.single_edges.weight
    assert weight is not None
    compare(
        ours,
        theirs,
        x,
        call_ours=lambda x: ours(view, x, weight=view.weight),
        call_theirs=lambda x: theirs(x, index, weight.to(dtype)),
    )
    part, _ = block(graph, 6)
    torch.testing.assert_close(ours(part, x, weight=part.weight), ours(view, x, weight=view.weight)[:6])


@pytest.mark.parametrize("loops", ["none", "some", "parallel"])
def test_gcn2_with_edge_weights_equals_its_peer(loops: str) -> None:
    graph = weighted_graph(loops)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = nn.GCN2Conv(5, 0.2).double(), pyg.GCN2Conv(5, 0.2)
    weight = graph.single_edges.weight
    assert weight is not None
    compare(
        ours,
        theirs,
        graph.single_nodes.x.double(),
        call_ours=lambda x: ours(view, x, x.sin(), weight=view.weight),
        call_theirs=lambda x: theirs(x, x.sin(), index, weight.double()),
    )


@pytest.mark.parametrize("width", [3, 8])
def test_improved_gcn_equals_its_peer(width: int) -> None:
    graph = random_graph()
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = both("GCNConv", width, improved=True)(5)
    ours.double()
    ones = torch.ones(index.shape[1], dtype=torch.float64)  # without weights PyG 2.8 forgets that loops weigh 2
    compare(
        ours,
        theirs,
        graph.single_nodes.x.double(),
        call_ours=lambda x: ours(view, x),
        call_theirs=lambda x: theirs(x, index, ones),
    )


@pytest.mark.parametrize("loops", ["none", "some", "parallel"])
def test_gcn_gives_gradients_to_edge_weights(loops: str) -> None:
    graph = weighted_graph(loops)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    for width in (3, 8):
        ours, theirs = both("GCNConv", width)(5)
        ours.double()
        theirs.double().load_state_dict(ours.state_dict())
        x = graph.single_nodes.x.double()
        a, b = (torch.rand(index.shape[1], dtype=torch.float64).requires_grad_() for _ in range(2))
        b.data.copy_(a.data)
        out, expected = ours(view, x, weight=a), theirs(x, index, b)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert a.grad is not None and b.grad is not None
        # Of parallel loops torch_geometric uses one and gives all of them its gradient.
        is_used = (a.grad != 0) | (index[0] != index[1])
        loops_at = index[0, index[0] == index[1]]
        assert int((~is_used).sum()) == len(loops_at) - len(loops_at.unique())
        torch.testing.assert_close(a.grad[is_used], b.grad[is_used])
    with pytest.raises(ConfigError, match="found a block"):
        ours(block(graph, 4)[0], x, weight=torch.rand(int(graph.single_edges.indptr[4])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_attention_with_edge_features_equals_its_peer(kind: str, loops: bool, dtype: torch.dtype) -> None:
    graph = random_graph(loops=loops)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = both(kind, 3, heads=2, edge_dim=4)(5)
    ours.to(dtype)
    attr = graph.single_edges.attr
    assert attr is not None
    compare(
        ours,
        theirs,
        graph.single_nodes.x.to(dtype),
        call_ours=lambda x: ours(view, x, edge_attr=view.attr),
        call_theirs=lambda x: theirs(x, index, attr.to(dtype)),
    )
    with pytest.raises(ConfigError, match="4 columns, found 1"):
        ours(view, graph.single_nodes.x.to(dtype), edge_attr=attr[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings", [{}, {"theta": 0.5, "layer": 3}, {"shared_weights": False, "theta": 1.0, "layer": 1}]
)
def test_gcn2_equals_its_peer(settings: Mapping[str, Any], dtype: torch.dtype) -> None:
    graph = random_graph(loops=True)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = nn.GCN2Conv(5, 0.2, **settings).to(dtype), pyg.GCN2Conv(5, 0.2, **settings)
    x = graph.single_nodes.x.to(dtype)
    compare(
        ours, theirs, x, call_ours=lambda x: ours(view, x, x.sin()), call_theirs=lambda x: theirs(x, x.sin(), index)
    )
    whole = ours(view, x, x.sin())
    torch.testing.assert_close(ours(block(graph, 7)[0], x, x.sin()), whole[:7], **tolerance(dtype))


RELATIONS = [EdgeType("node", name, "node") for name in ("cites", "follows", "likes")]


def several_relations() -> tuple[Graph, Tensor, Tensor]:
    """(a graph of one node type and three edge types, its edge_index and edge_type as PyG takes them)."""
    random = torch.Generator().manual_seed(3)
    indices = [torch.randint(0, 25, (2, 60), generator=random) for _ in RELATIONS]
    edges = {
        kind: validated_edges(index, num_src=30, num_dst=30) for kind, index in zip(RELATIONS, indices, strict=True)
    }
    graph = Graph.of({"node": validated_nodes(30, x=torch.randn(30, 5, generator=random))}, edges)
    kinds = torch.arange(len(RELATIONS)).repeat_interleave(60)
    return graph, torch.cat([table.edge_index() for table in edges.values()], 1), kinds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{}, {"num_bases": 2}, {"aggr": "add"}, {"root_weight": False, "bias": False}])
def test_rgcn_equals_its_peer(settings: Mapping[str, Any], dtype: torch.dtype) -> None:
    graph, index, kinds = several_relations()
    view = LocalView.of_graph(graph)
    ours, theirs = nn.RGCNConv(5, 4, 3, **settings).to(dtype), pyg.RGCNConv(5, 4, 3, **settings)
    x = graph.single_nodes.x.to(dtype)
    # PyG's layer starts from zeros of the default type.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        compare(ours, theirs, x, call_ours=lambda x: ours(view, x), call_theirs=lambda x: theirs(x, index, kinds))
    finally:
        torch.set_default_dtype(before)
    with pytest.raises(ConfigError, match="built for 2 edge types, the graph has 3"):
        nn.RGCNConv(5, 4, 2)(view, x.float())


def test_rgcn_on_several_node_types_equals_one_of_all_nodes() -> None:
    random = torch.Generator().manual_seed(5)
    buys = torch.stack([torch.randint(0, 10, (40,), generator=random), torch.randint(0, 7, (40,), generator=random)])
    knows = torch.randint(0, 10, (2, 30), generator=random)
    tables = {
        EdgeType("user", "buys", "item"): validated_edges(buys, num_src=10, num_dst=7),
        EdgeType("user", "knows", "user"): validated_edges(knows, num_src=10, num_dst=10),
    }
    graph = Graph.of({"user": validated_nodes(10), "item": validated_nodes(7)}, tables)
    view = LocalView.of_graph(graph)
    x = torch.randn(17, 5, dtype=torch.float64, generator=random)
    layer = nn.RGCNConv(5, 3, 2).double()
    peer = pyg.RGCNConv(5, 3, 2).double()
    peer.load_state_dict(layer.state_dict())
    index = torch.cat([buys + torch.tensor([[0], [10]]), knows], 1)
    expected = peer(x, index, torch.tensor([0] * 40 + [1] * 30))
    out = layer(view, {"user": x[:10], "item": x[10:]})
    torch.testing.assert_close(out["user"], expected[:10])
    torch.testing.assert_close(out["item"], expected[10:])
    assert list(layer(view, {"user": x[:10], "item": x[10:]}, only="item")) == ["item"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_res_plus_block_equals_its_peer(dtype: torch.dtype) -> None:
    graph = random_graph()
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours = nn.ResPlusBlock(nn.GENConv(5, 5, norm="layer"), nn.BatchNorm(5)).to(dtype)
    theirs = pyg.DeepGCNLayer(pyg.GENConv(5, 5, norm="layer"), pyg.BatchNorm(5), torch.nn.ReLU(), block="res+")
    x = graph.single_nodes.x.to(dtype)
    compare(ours, theirs, x, call_ours=lambda x: ours(view, x), call_theirs=lambda x: theirs(x, index))


class EdgeConv(torch.nn.Module):
    """A layer a user may write: x'_i = max_j W [x_i, x_j − x_i], through ``propagate``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.nn = torch.nn.Linear(2 * width, out)

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        def message(
            src: Mapping[str, Tensor], dst: Mapping[str, Tensor], edge: Any, weight: Tensor, bias: Tensor
        ) -> Tensor:
            both = torch.cat([dst["x"], src["x"] - dst["x"]], 1)
            return torch.nn.functional.linear(both, weight, bias)

        params = (self.nn.weight, self.nn.bias)
        return view.propagate(message, src={"x": x}, dst={"x": x}, params=params, reduce="max")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_custom_layer_equals_its_peer(dtype: torch.dtype) -> None:
    graph = random_graph(edges=120)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = EdgeConv(5, 3).to(dtype), pyg.EdgeConv(torch.nn.Linear(10, 3), aggr="max")
    x = graph.single_nodes.x.to(dtype)
    compare(ours, theirs, x, call_ours=lambda x: ours(view, x), call_theirs=lambda x: theirs(x, index))


def test_layers_refuse_settings_they_do_not_support() -> None:
    with pytest.raises(ConfigError, match="found 'median'"):
        nn.SAGEConv(3, 3, aggr="median")
    with pytest.raises(ConfigError, match="normalize=True"):
        nn.GCNConv(3, 3, add_self_loops=True, normalize=False)
    with pytest.raises(ConfigError, match="theta and layer together"):
        nn.GCN2Conv(3, 0.1, theta=0.5)
    graph, _, _ = several_relations()
    with pytest.raises(ConfigError, match="use rgcn"):
        nn.SAGEConv(5, 3)(LocalView.of_graph(graph), graph.single_nodes.x)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv"])
def test_initial_weights_equal_those_of_the_peer(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = both(name, 80)(70)
    for key, mine in ours.state_dict().items():
        other = theirs.state_dict()[key]
        assert abs(mine.std() - other.std()) <= 0.15 * other.std() + 1e-9, key
        assert abs(mine.abs().max() - other.abs().max()) <= 0.15 * other.abs().max() + 1e-9, key


def gine() -> tuple[torch.nn.Module, torch.nn.Module]:
    def perceptron() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))

    settings = {"eps": 0.3, "train_eps": True, "edge_dim": 4}
    return nn.GINConv(perceptron(), **settings), pyg.GINEConv(perceptron(), **settings)


WITH_FEATURES = {
    "gine": gine,
    "gen": lambda: both("GENConv", 6, norm="layer", edge_dim=4, bias=True)(5),
    "gen learnt temperature": lambda: both("GENConv", 5, norm="layer", edge_dim=4, t=0.5, learn_t=True)(5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_FEATURES)
def test_sums_with_edge_features_equal_their_peers(name: str, dtype: torch.dtype) -> None:
    graph = random_graph(loops=True)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = WITH_FEATURES[name]()
    ours.to(dtype)
    x, attr = graph.single_nodes.x.to(dtype), graph.single_edges.attr.to(dtype)
    compare(
        ours,
        theirs,
        x,
        call_ours=lambda x: ours(view, x, edge_attr=view.attr),
        call_theirs=lambda x: theirs(x, index, attr),
    )
    torch.testing.assert_close(
        ours(block(graph, 7)[0], x, edge_attr=block(graph, 7)[0].attr), ours(view, x, edge_attr=attr)[:7]
    )
    with pytest.raises(ConfigError, match="4 columns, found 1"):
        ours(view, x, edge_attr=attr[:, 0])


class WeightedSum(pyg.MessagePassing):
    """Σ w m / divisor, by torch_geometric; m is x_j, or ReLU(x_j + e)."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, index: Tensor, weight: Tensor, attr: Tensor | None = None) -> Tensor:
        return self.propagate(index, x=x, weight=weight, attr=attr)

    def message(self, x_j: Tensor, weight: Tensor, attr: Tensor | None) -> Tensor:
        return weight[:, None] * (x_j if attr is None else torch.relu(x_j + attr))


@pytest.mark.parametrize("out", [3, 8])
def test_edge_weights_and_features_follow_their_formulas(out: int) -> None:
    """SAGE: (Σ w x, Σ w e) / Σ |w|, and Σ w x; GIN: Σ w ReLU(x + e). Nodes whose weights are all 0 get 0."""
    graph = random_graph(loops=True)
    index, sums = graph.single_edges.edge_index(), WeightedSum()
    weight = torch.randn(graph.num_edges, dtype=torch.float64).where(index[1] != 3, torch.zeros(()))
    attr, x = graph.single_edges.attr.double(), graph.single_nodes.x.double()
    edge_sum = torch.zeros(graph.num_nodes, 4, dtype=torch.float64)
    view = LocalView.of_graph(graph)
    sage, plain = nn.SAGEConv(5, out, edge_dim=4).double(), nn.SAGEConv(5, out, aggr="sum").double()
    gin = nn.GINConv(torch.nn.Linear(5, out), edge_dim=4).double()

    def by_hand(x: Tensor, w: Tensor) -> list[Tensor]:
        divisor = torch.zeros(graph.num_nodes, dtype=x.dtype).index_add(0, index[1], w.abs())
        mean = w / torch.where(divisor > 0, divisor, torch.inf)[index[1]]
        edges = edge_sum.index_add(0, index[1], attr * mean[:, None])
        return [
            sage.lin_l(sums(x, index, mean)) + sage.lin_r(x) + sage.lin_edge(edges),
            plain.lin_l(sums(x, index, w)) + plain.lin_r(x),
            gin.nn(x + sums(x, index, w, gin.lin(attr))),
        ]

    def ours(x: Tensor, w: Tensor) -> list[Tensor]:
        data = {"weight": w, "edge_attr": attr}
        return [sage(view, x, **data), plain(view, x, weight=w), gin(view, x, **data)]

    for number in range(3):
        grads = []
        for run in (ours, by_hand):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            rows = run(*leaves)[number]
            grads.append([rows, *torch.autograd.grad(rows.square().sum(), leaves)])
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_rgcn_with_edge_weights_follows_its_formula(aggr: str) -> None:
    """Σ_r (Σ w x / Σ |w|, or Σ w x) Θ_r; an edge type without weights has the plain mean or sum."""
    graph, _, _ = several_relations()
    weight = torch.randn(60, generator=torch.Generator().manual_seed(4)).where(
        torch.arange(60) % 7 > 0, torch.zeros(())
    )
    tables = dict(graph.edges) | {RELATIONS[0]: replace(graph.edges[RELATIONS[0]], weight=weight)}
    view, x = LocalView.of_graph(Graph.of(graph.nodes, tables)), graph.single_nodes.x.double()
    layer = nn.RGCNConv(5, 4, 3, aggr=aggr).double()
    out = layer.bias + x @ layer.root
    for number, table in enumerate(tables.values()):
        src, dst = table.edge_index()
        factor = torch.ones(60).double() if table.weight is None else table.weight.double()
        total = torch.zeros(30, dtype=torch.float64).index_add(0, dst, factor.abs())
        factor = factor / torch.where(total > 0, total, torch.inf)[dst] if aggr == "mean" else factor
        out = out.index_add(0, dst, (factor[:, None] * x[src]) @ layer.weight[number])
    torch.testing.assert_close(layer(view, x, weighted=True), out, rtol=1e-10, atol=1e-10)
    sums = view.aggregate_relations({"node": x}, reduce=aggr, weighted=True).values()
    coefficient = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    combined = view.combine_relations(x, coefficient, reduce=aggr, weighted=True)
    torch.testing.assert_close(combined, sum(c * rows for c, rows in zip(coefficient, sums, strict=True)))
