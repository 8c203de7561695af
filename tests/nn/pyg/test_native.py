"""Convolutions of torch_geometric on the verbs of views: taken for equal options, exact, and left alone otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.utils import remove_self_loops

from gnnfleet.comm.world import World
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.nn.pyg.native import describe
from gnnfleet.nn.pyg.source_index import SourceFetcher
from gnnfleet.ops.draws import DrawKey
from tests.equivalence.spread import KEY, cut_graph, open_view, plain_graph, related_graph
from tests.nn.pyg.outcomes import Outcome, assert_equal, build, joined, run_on_view, run_plain
from tests.nn.pyg.zoo import EDGE_DIM, HIDDEN, IN, OUT, Two, two
from tests.ranks import RankPool

Make = Callable[[], torch.nn.Module]


def stacked(kind: type[torch.nn.Module], *inputs: str, **options: Any) -> Make:
    return two(lambda i, o: kind(i, o, **options), *inputs)


def attention(kind: type[torch.nn.Module], *inputs: str, **options: Any) -> Make:
    """Two heads; the second layer reads those of the first."""
    width = HIDDEN * (2 if options.get("concat", True) else 1)
    first, second = {"heads": 2, **options}, {"heads": 2, **options}
    return lambda: Two(kind(IN, HIDDEN, **first), kind(width, OUT, **second), inputs)


def gin(kind: type[torch.nn.Module], *inputs: str, **options: Any) -> Make:
    def perceptron(in_channels: int, out_channels: int) -> torch.nn.Module:
        return Sequential(Linear(in_channels, 6), BatchNorm1d(6), ReLU(), Linear(6, out_channels))

    return two(lambda i, o: kind(perceptron(i, o), **options), *inputs)


class DeepGCN(torch.nn.Module):
    """GCN2 after a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lin = Linear(IN, HIDDEN)
        self.convs = torch.nn.ModuleList(pyg.GCN2Conv(HIDDEN, 0.2, theta=0.5, layer=i + 1, **options) for i in range(2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = first = torch.relu(self.lin(x))
        for conv in self.convs:
            x = torch.relu(conv(x, first, edge_index, edge_weight=edge_weight))
        return x


NATIVE: dict[str, Make] = {
    "sage": stacked(pyg.SAGEConv),
    "sage sum": stacked(pyg.SAGEConv, aggr="sum"),
    "sage add, no bias": stacked(pyg.SAGEConv, aggr="add", bias=False),
    "sage max": stacked(pyg.SAGEConv, aggr="max"),
    "sage normalised": stacked(pyg.SAGEConv, normalize=True),
    "sage projected": stacked(pyg.SAGEConv, project=True, aggr="max"),
    "sage no root": stacked(pyg.SAGEConv, root_weight=False),
    "sage of two widths": lambda: Two(pyg.SAGEConv((IN, IN), HIDDEN), pyg.SAGEConv(HIDDEN, OUT)),
    "gcn": stacked(pyg.GCNConv),
    "gcn with weights": stacked(pyg.GCNConv, "edge_weight"),
    "gcn with weights, cached, no bias": stacked(pyg.GCNConv, "edge_weight", cached=True, bias=False),
    "gcn not normalised": stacked(pyg.GCNConv, "edge_weight", normalize=False),
    "gcn2": lambda: DeepGCN(),
    "gcn2 two matrices": lambda: DeepGCN(shared_weights=False),
    "gcn2 not normalised": lambda: DeepGCN(normalize=False),
    "gat": attention(pyg.GATConv),
    "gat averaged": attention(pyg.GATConv, concat=False, negative_slope=0.1),
    "gat no loops": attention(pyg.GATConv, add_self_loops=False, bias=False),
    "gat edges": attention(pyg.GATConv, "edge_attr", edge_dim=EDGE_DIM, residual=True),
    "gat edges, no loops": attention(pyg.GATConv, "edge_attr", edge_dim=EDGE_DIM, add_self_loops=False),
    "gatv2": attention(pyg.GATv2Conv),
    "gatv2 shared": attention(pyg.GATv2Conv, share_weights=True, concat=False),
    "gatv2 edges": attention(pyg.GATv2Conv, "edge_attr", edge_dim=EDGE_DIM, residual=True, bias=False),
    "gin": gin(pyg.GINConv),
    "gin learnt eps": gin(pyg.GINConv, eps=0.3, train_eps=True),
    "gine": gin(pyg.GINEConv, "edge_attr", eps=0.3, train_eps=True, edge_dim=EDGE_DIM),
    "gen": stacked(pyg.GENConv),
    "gen edges": lambda: Two(
        pyg.GENConv(IN, HIDDEN, edge_dim=EDGE_DIM, bias=True),
        pyg.GENConv(HIDDEN, HIDDEN, edge_dim=EDGE_DIM, learn_t=True),
        ("edge_attr",),
    ),
    "gen of one width": lambda: Two(pyg.GENConv(IN, IN, num_layers=3, norm="layer"), pyg.SAGEConv(IN, OUT)),
    "gen learnt temperature": stacked(pyg.GENConv, learn_t=True, t=0.5, bias=True),
    "model": lambda: pyg.GAT(IN, HIDDEN, 2, OUT, heads=2, norm="batch", jk="cat"),
}


class Doubled(pyg.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j


class Calls(torch.nn.Module):
    """A convolution called in another way than with all edges, their own data, and one tensor of rows."""

    def __init__(self, conv: torch.nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.call = conv, call

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        return self.call(self.conv, x, edge_index, edge_weight, edge_attr)


def hooked() -> torch.nn.Module:
    conv = pyg.SAGEConv(IN, OUT)
    conv.register_message_forward_hook(lambda module, inputs, out: out * 3)
    return conv


def replaced() -> torch.nn.Module:
    conv = pyg.SAGEConv(IN, OUT)
    conv.message = lambda x_j: x_j + 1  # type: ignore[method-assign]
    return conv


def hooked_map() -> torch.nn.Module:
    conv = pyg.SAGEConv(IN, OUT)
    conv.lin_l.register_forward_hook(lambda module, inputs, out: out * 2)
    return conv


OTHERS: dict[str, Make] = {
    "subclass": lambda: Doubled(IN, OUT),
    "several aggregations": lambda: pyg.SAGEConv(IN, OUT, aggr=["mean", "max"]),
    "hooks": hooked,
    "replaced method": replaced,
    "hooks of a linear map": hooked_map,
    "gat with another fill value": lambda: Two(
        pyg.GATConv(IN, OUT, edge_dim=EDGE_DIM, fill_value=0.5), pyg.SAGEConv(OUT, OUT, aggr="std"), ()
    ),
    "gat with two maps": lambda: pyg.GATConv((IN, IN), OUT),
    "gcn improved": lambda: pyg.GCNConv(IN, OUT, improved=True),
    "gcn without added loops": lambda: pyg.GCNConv(IN, OUT, add_self_loops=False),
    "gen with a power mean": lambda: pyg.GENConv(IN, OUT, aggr="powermean", learn_p=True),
    "gen with normalised messages": lambda: pyg.GENConv(IN, OUT, msg_norm=True),
}
CALLS: dict[str, Make] = {
    "pair": lambda: Calls(pyg.SAGEConv(IN, OUT), lambda conv, x, index, w, a: conv((x, x), index)),
    "size": lambda: Calls(pyg.SAGEConv(IN, OUT), lambda conv, x, index, w, a: conv(x, index, size=(len(x), len(x)))),
    "some edges": lambda: Calls(
        pyg.SAGEConv(IN, OUT), lambda conv, x, index, w, a: conv(x, remove_self_loops(index)[0])
    ),
    "other weights": lambda: Calls(pyg.GCNConv(IN, OUT), lambda conv, x, index, w, a: conv(x, index, 2 * w)),
    "changed features": lambda: Calls(
        pyg.GATConv(IN, OUT, edge_dim=EDGE_DIM), lambda conv, x, index, w, a: conv(x, index, a.clone().mul_(2))
    ),
    "returned attention": lambda: Calls(
        pyg.GATConv(IN, OUT), lambda conv, x, index, w, a: conv(x, index, return_attention_weights=True)[0]
    ),
    "edge features of gen as they are": lambda: Calls(
        pyg.GENConv(IN, EDGE_DIM), lambda conv, x, index, w, a: conv(x, index, a)
    ),
}
ALL = NATIVE | OTHERS | CALLS


def counted(view: Any, name: str) -> Outcome:
    """Run a module, and count how often it gathers rows by edges as torch_geometric does."""
    fetches, fetch = [], SourceFetcher.fetch

    def counting(self: SourceFetcher, x: Tensor, dim: int = 0) -> Tensor:
        fetches.append(1)
        return fetch(self, x, dim)

    with mock.patch.object(SourceFetcher, "fetch", counting):
        result = run_on_view(view, ALL[name])
    return {**result, "fetches": len(fetches)}


def on_rank(world: World, path: str, names: list[str]) -> dict[str, Outcome]:
    return {name: counted(open_view(world, path, 1, 1), name) for name in names}


def check(name: str, actual: Outcome, fetches: int, expected: Outcome) -> None:
    assert_equal(actual, expected, name)
    assert (fetches == 0) == (name in NATIVE), f"{name} gathered rows by edges {fetches} times"


@pytest.mark.parametrize("name", ALL)
def test_a_convolution_on_the_whole_graph_equals_torch_geometric(name: str) -> None:
    result = counted(LocalView.of_graph(plain_graph()).with_step(key=KEY), name)
    check(name, result, result["fetches"], run_plain(ALL[name]))


@pytest.mark.parametrize(("size", "cut"), [(2, "random"), (3, "edgeless")])
def test_convolutions_on_parts_equal_torch_geometric(pool: RankPool, tmp_path: Path, size: int, cut: str) -> None:
    path = cut_graph(plain_graph(), size, cut, tmp_path / "parts")
    names = [name for name in ALL if size == 2 or "gcn" in name]
    ranks = pool.run(size, on_rank, str(path), names)
    for name in names:
        check(name, joined([rank[name] for rank in ranks]), ranks[0][name]["fetches"], run_plain(ALL[name]))


@pytest.mark.parametrize("options", [{}, {"num_bases": 2, "bias": False}, {"root_weight": False, "aggr": "max"}])
def test_relational_convolutions_equal_torch_geometric(options: dict[str, Any]) -> None:
    graph, module = related_graph(), build(lambda: pyg.RGCNConv(4, OUT, 4, **options))
    indices = [edges.edge_index() for edges in graph.edges.values()]
    numbers = torch.cat([torch.full((index.shape[1],), number) for number, index in enumerate(indices)])
    features = graph.single_nodes.x
    assert features is not None
    x, other = (features.double().requires_grad_() for _ in range(2))
    with mock.patch.object(SourceFetcher, "fetch", side_effect=AssertionError("gathered rows by edges")):
        out = PygModule(module)(LocalView.of_graph(graph), x)
    assert isinstance(out, Tensor)
    expected = module(other, torch.cat(indices, 1), numbers)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(rows.sin().sum(), [leaf, *module.parameters()])
        for rows, leaf in ((out, x), (expected, other))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


def test_the_graph_has_parallel_loops_of_different_weights() -> None:
    edges = plain_graph().single_edges
    index = edges.edge_index()
    is_loop = index[0] == index[1]
    assert len(index[0, is_loop].unique()) < int(is_loop.sum())


def test_convolutions_that_are_replaced_are_counted() -> None:
    assert describe(pyg.GraphSAGE(IN, HIDDEN, 3, OUT)) == ("3 of 3 convolutions run on gnnfleet kernels",)
    mixed = Sequential(pyg.GATConv(IN, OUT), Doubled(IN, OUT), pyg.SAGEConv(-1, OUT))
    assert describe(mixed)[0].startswith("1 of 3"), "parameters of the third are not created"
    explained = pyg.GCNConv(IN, OUT)
    explained.explain = True
    assert describe(explained)[0].startswith("0 of 1")
    assert describe(Linear(2, 2)) == ()


class AsInPyg(pyg.GATConv):
    """Not replaced."""


class Parallel(torch.nn.Module):
    """Two convolutions with the same parameters and attention dropout, side by side."""

    def __init__(self, kind: type[pyg.GATConv]) -> None:
        super().__init__()
        self.first = kind(IN, OUT, heads=2, dropout=0.5)
        self.second = kind(IN, OUT, heads=2, dropout=0.5)
        self.second.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.cat([self.first(x, edge_index), self.second(x, edge_index)], 1)


def dropped_on_rank(world: World, path: str) -> Outcome:
    return run_on_view(open_view(world, path, 1, 1), lambda: Parallel(pyg.GATConv))


def test_attention_dropout_draws_by_edge_and_convolution(pool: RankPool, tmp_path: Path) -> None:
    view = LocalView.of_graph(plain_graph()).with_step(key=KEY, layer=1)
    expected = run_on_view(view, lambda: Parallel(pyg.GATConv))
    first, second = expected["out"].chunk(2, 1)
    assert not torch.allclose(first, second), "both convolutions use one mask"
    as_in_pyg = run_on_view(view, lambda: Parallel(AsInPyg))["out"]
    torch.testing.assert_close(as_in_pyg.chunk(2, 1)[0], first, msg="the code of torch_geometric drops other edges")
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    assert_equal(joined(pool.run(2, dropped_on_rank, str(path))), expected, "two ranks")


def test_attention_dropout_keeps_the_mean() -> None:
    module = build(lambda: pyg.GATConv(IN, 1, bias=False, dropout=0.4))
    with torch.no_grad():
        module.lin.weight.fill_(1.0)  # type: ignore[union-attr, operator]
    view = LocalView.of_graph(plain_graph())
    x = torch.full((view.num_src, IN), 1 / IN, dtype=torch.float64)
    steps = [PygModule(module)(view.with_step(key=DrawKey(1, 0, step)), x) for step in range(40)]
    out = torch.stack([step.detach() for step in steps if isinstance(step, Tensor)])
    assert abs(float(out.mean()) - 1) < 0.03 and float(out.std()) > 0.1
