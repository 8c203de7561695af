"""Models: equal to torch_geometric's, layer by layer, on blocks, and with a precomputed first aggregate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn.models as pyg
from torch import Tensor

from gnnfleet import nn
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.config import MODELS as ALL_MODELS
from gnnfleet.nn.interop import load_pyg_state, to_pyg_state
from gnnfleet.ops.draws import DrawKey
from tests.graph.induced_view import induced_view
from tests.nn.peers import DTYPES, block, compare, random_graph

NORMS = {"none": {}, "layer": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}, "batch": {"norm": "batch_norm"}}
PEERS = {
    "sage": (pyg.GraphSAGE, {}, {}),
    "sage pool": (pyg.GraphSAGE, {"aggr": "pool"}, {"aggr": "max", "project": True}),
    "gcn": (pyg.GCN, {}, {}),
    "gat": (pyg.GAT, {"heads": 2, "act": "elu"}, {"heads": 2, "act": "elu"}),
    "gatv2": (pyg.GAT, {"heads": 2}, {"heads": 2, "v2": True}),
    "gin": (pyg.GIN, {"train_eps": True}, {"train_eps": True}),
}


def config(name: str, **settings: Any) -> nn.ModelConfig:
    settings = {"hidden": 8, "layers": 3, "heads": 2, "dropout": 0.0, **settings}
    return nn.ModelConfig(name=name, edge_features=False, edge_weight=False, **settings)


def peers(name: str, norm: str, layers: int = 3) -> tuple[nn.GNN, torch.nn.Module]:
    kind, mine, other = PEERS[name]
    model = nn.GNN(config(name.split()[0], norm=norm, layers=layers, **mine), 5, 3)
    return model, kind(5, 8, layers, 3, **NORMS[norm], **other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", PEERS)
def test_a_model_equals_its_peer(name: str, norm: str, dtype: torch.dtype) -> None:
    graph = random_graph(loops=True)
    view, index = LocalView.of_graph(graph), graph.single_edges.edge_index()
    ours, theirs = peers(name, norm)
    ours.to(dtype)
    x = graph.single_nodes.x.to(dtype)
    compare(ours, theirs, x, call_ours=lambda x: ours(view, x), call_theirs=lambda x: theirs(x, index))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(view, x), theirs(x, index))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", PEERS)
def test_weights_of_a_model_and_its_peer_are_exchangeable(name: str, norm: str, layers: int) -> None:
    ours, theirs = peers(name, norm, layers)
    load_pyg_state(ours, theirs.state_dict())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor)
    _, fresh = peers(name, norm, layers)
    fresh.load_state_dict(to_pyg_state(ours))
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], tensor)


def test_weights_that_do_not_fit_change_nothing() -> None:
    ours = nn.GNN(config("gcn"), 5, 3)
    before = to_pyg_state(ours)
    with pytest.raises(ConfigError, match=r"not those of a gcn like this one: the state lacks convs\.2\.bias"):
        load_pyg_state(ours, pyg.GCN(5, 8, 2, 3).state_dict())
    with pytest.raises(ConfigError, match=r"convs.0.bias must be \[8\], found \[9\]"):
        load_pyg_state(ours, pyg.GCN(5, 9, 3, 3).state_dict())
    with pytest.raises(ConfigError, match="no model like res"):
        to_pyg_state(nn.GNN(config("res+"), 5, 3))
    with pytest.raises(ConfigError, match="has no residual"):
        to_pyg_state(nn.GNN(config("gcn", residual=True), 5, 3))
    assert all(torch.equal(tensor, before[key]) for key, tensor in ours.state_dict().items())


MODELS = [name for name in ALL_MODELS if name != "sign"]  # whose layers read neighbours


def build(name: str, graph: Graph, **settings: Any) -> nn.GNN:
    torch.manual_seed(0)
    return nn.build_model(nn.ModelConfig(name=name, **{"hidden": 8, "heads": 2, **settings}), graph).double()


@pytest.mark.parametrize("name", MODELS)
def test_layer_by_layer_with_dropout_equals_forward(name: str) -> None:
    graph = random_graph()
    model = build(name, graph, input_dropout=0.2)
    view = LocalView.of_graph(graph).with_step(key=DrawKey(seed=1, epoch=2, step=3))
    x = graph.single_nodes.x.double()
    expected = model(view, x)
    assert torch.equal(model([view] * 3, x), expected), "the same draws give the same result"
    assert not torch.equal(model(view.with_step(key=DrawKey(seed=2)), x), expected)
    rows: Any = x
    carry = None
    for index in range(model.num_layers):
        rows, carry = model.layer(index, view, rows, carry)
    assert torch.equal(rows, expected)
    off = model(view.with_step(training=False), x)
    model.eval()
    assert torch.equal(model(view, x), off), "view and model must both train for anything to be dropped"


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("name", MODELS)
def test_a_chain_of_blocks_gives_the_first_rows(name: str, norm: str) -> None:
    graph = random_graph(loops=True)
    model = build(name, graph, norm=norm)
    whole = LocalView.of_graph(graph).with_step(key=DrawKey(seed=4))
    x = graph.single_nodes.x.double()
    views = [whole, whole, block(graph, 4)[0].with_step(key=DrawKey(seed=4))]
    torch.testing.assert_close(model(views, x), model(whole, x)[:4])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gcn", {}),
        ("sage", {"edge_features": False}),
        ("sage", {"aggr": "max", "edge_features": False}),
        ("gin", {"edge_features": False}),
    ],
)
def test_a_precomputed_first_aggregate_changes_no_result(name: str, settings: dict[str, Any]) -> None:
    graph = random_graph()
    view, x = LocalView.of_graph(graph), graph.single_nodes.x.double()
    for hidden in (4, 16):
        model = build(name, graph, hidden=hidden, **settings)
        aggregate = model.precompute(view, x)
        assert aggregate is not None and not aggregate.requires_grad
        out, expected = model(view, x, aggregated=aggregate), model(view, x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(model.embed(view, x, aggregated=aggregate), model.embed(view, x))
        mine = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        other = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b)
        again = model.precompute(view, x)
        torch.testing.assert_close(again, aggregate, rtol=0, atol=0, msg="a step does not write to it")


def test_an_aggregate_that_depends_on_the_step_is_not_precomputed() -> None:
    graph = random_graph()
    view, x = LocalView.of_graph(graph), graph.single_nodes.x.double()
    unkept = [("gat", {}), ("gcn", {"input_dropout": 0.1}), ("sage", {"embedding": 2}), ("sage", {"aggr": "pool"})]
    unkept += [("gcn2", {}), ("rgcn", {"input_dropout": 0.1}), ("res+", {}), ("sage", {}), ("gin", {})]
    for name, settings in unkept:
        assert build(name, graph, **settings).precompute(view, x) is None


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    graph = random_graph(nodes=8, edges=14, width=3)
    model = build(name, graph, hidden=4, layers=2, act="elu", norm="batch", dropout=0.3)
    view = LocalView.of_graph(graph).with_step(key=DrawKey(seed=7))
    names = [key for key, _ in model.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, state, (view, x))

    x = graph.single_nodes.x.double().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *model.parameters()), eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_products_in_bfloat16_change_little(name: str, norm: Any) -> None:
    graph = random_graph(nodes=60, edges=400)
    model = build(name, graph, norm=norm, hidden=16, dropout=0.0).float()
    view, x = LocalView.of_graph(graph), graph.single_nodes.x
    expected = model(view, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(view, x)
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def hetero_graph() -> Graph:
    random = torch.Generator().manual_seed(5)

    def ends(sources: int, targets: int) -> Tensor:
        rows = [torch.randint(0, count, (40,), generator=random) for count in (sources, targets)]
        return torch.stack(rows)

    shapes = {EdgeType("user", "buys", "item"): (10, 7), EdgeType("item", "by", "user"): (7, 10)}
    edges = {kind: validated_edges(ends(n, m), num_src=n, num_dst=m) for kind, (n, m) in shapes.items()}
    nodes = {
        "user": validated_nodes(10),
        "item": validated_nodes(
            7, x=torch.randn(7, 5, generator=random), y=torch.randint(0, 3, (7,), generator=random)
        ),
    }
    return Graph.of(nodes, edges)


@pytest.mark.parametrize("norm", NORMS)
def test_rgcn_on_several_node_types(norm: Any) -> None:
    graph = hetero_graph()
    model = build("rgcn", graph, norm=norm, bases=2)
    view = LocalView.of_graph(graph).with_step(key=DrawKey(seed=3))
    x = {"item": graph.nodes["item"].x.double()}
    out = model(view, x)
    assert out.shape == (7, 3) and torch.equal(out, model(view, x))
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.convs.parameters())
    rows = model.embed(view, x)
    assert isinstance(rows, dict) and {kind: tuple(t.shape) for kind, t in rows.items()} == {
        "user": (10, 8),
        "item": (7, 8),
    }
    assert list(model.embeddings) == ["user"], "nodes without features get embeddings"
    assert set(model.projections) == {"user", "item"}


def test_embeddings_beside_and_instead_of_features() -> None:
    graph = random_graph()
    beside = build("sage", graph, embedding=6)
    assert beside.convs[0].in_channels == 5 + 6
    bare = Graph(graph.single_edges.edge_index(), num_nodes=30, y=graph.single_nodes.y)
    instead = build("gcn", bare)
    out = instead(LocalView.of_graph(bare), None)
    out.sum().backward()
    (rows,) = instead.embeddings.values()
    assert rows.weight.shape == (30, 8) and rows.weight.grad is not None
    some = torch.arange(0, 30, 2)
    part = induced_view(bare, {"node": some})
    assert torch.equal(rows(part), rows.weight[some])


def test_wrong_or_missing_settings_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="no model 'sgae': did you mean 'sage'"):
        nn.ModelConfig(name="sgae")
    with pytest.raises(ConfigError, match="no setting 'hiden': did you mean 'hidden'"):
        nn.SAGE(hiden=3)
    with pytest.raises(ConfigError, match="hidden: input should be greater"):
        nn.GCN(hidden=0)
    with pytest.raises(ConfigError, match="multiple of heads, found 10 and 4"):
        nn.GAT(hidden=10)
    with pytest.raises(ConfigError, match="use one of rgcn, hetero-sage"):
        nn.build_model(nn.SAGE(), hetero_graph())
    unlabelled = Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3)
    with pytest.raises(InputError, match="give out_channels"):
        nn.build_model(nn.SAGE(), unlabelled)
    assert nn.build_model(nn.SAGE(hidden=4), unlabelled, out_channels=2).out_channels == 2
    graph = random_graph()
    with pytest.raises(ConfigError, match="needs a view for each, found 2"):
        build("sage", graph)([LocalView.of_graph(graph)] * 2, graph.single_nodes.x.double())
    with pytest.raises(InputError, match=r"found none: set model.embedding"):
        build("sage", graph)(LocalView.of_graph(graph), None)
    hetero = nn.HeteroSAGE, nn.HeteroGAT, nn.HeteroGATv2, nn.HeteroGIN, nn.HGT
    makers = nn.SAGE, nn.GCN, nn.GAT, nn.GATv2, nn.GIN, nn.RGCN, *hetero, nn.GCN2, nn.ResPlus, nn.SIGN
    for make, name in zip(makers, ALL_MODELS, strict=True):
        assert make(hidden=32, layers=2) == nn.ModelConfig(name=name, hidden=32, layers=2)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_normalised_input_equals_normalised_features(name: str) -> None:
    graph = random_graph()
    view = LocalView.of_graph(graph)
    x = graph.single_nodes.x.double()
    x[2] = 0
    unit = x / x.abs().sum(1, keepdim=True).clamp(min=1e-12)
    model = nn.GNN(config(name, input_norm="sum"), 5, 3).double()
    plain = nn.GNN(config(name), 5, 3).double()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model(view, x), plain(view, unit))
    aggregate = model.precompute(view, x)
    torch.testing.assert_close(model(view, x, aggregated=aggregate), plain(view, unit))
    x.mul_(torch.arange(1, 6))  # the same tensor with other values is another input
    torch.testing.assert_close(model(view, x), plain(view, x / x.abs().sum(1, keepdim=True).clamp(min=1e-12)))


def test_gradients_of_a_normalised_input_flow_in_every_step() -> None:
    graph = random_graph()
    model = nn.GNN(config("sage", input_norm="sum"), 5, 3)
    x = graph.single_nodes.x.clone().requires_grad_()
    for _ in range(2):
        x.grad = None
        model(LocalView.of_graph(graph), x).sum().backward()
        assert x.grad is not None and bool(x.grad.any())
