"""Layers over several node types equal torch_geometric's HeteroConv and HGTConv: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gnnfleet import nn
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.config import HETERO_MODELS
from gnnfleet.ops.draws import DrawKey
from tests.equivalence.spread import related_graph, typed_graph
from tests.nn.peers import randomise


def hetero_conv(package: Any, graph: Graph, kinds: str) -> torch.nn.Module:
    """Convs of the kinds in turn, one for each relation."""
    loops: dict[str, Any] = {"heads": 2, "add_self_loops": False}
    makers = {
        "sage": lambda: package.SAGEConv(4, 6),
        "max": lambda: package.SAGEConv(4, 6, aggr="max", normalize=True),
        "gin": lambda: package.GINConv(torch.nn.Linear(4, 6), train_eps=True),
        "gat": lambda: package.GATConv(4, 3, **loops),
        "gat-mean": lambda: package.GATConv(4, 6, **loops, concat=False),
        "gatv2": lambda: package.GATv2Conv(4, 3, **loops, residual=True),
    }
    names = kinds.split()
    convs = {kind: makers[names[number % len(names)]]() for number, kind in enumerate(graph.edges)}
    module: torch.nn.Module = package.HeteroConv(convs)
    return module


def edge_index(graph: Graph) -> dict[EdgeType, Tensor]:
    return {kind: edges.edge_index() for kind, edges in graph.edges.items()}


def run(call: Any, module: torch.nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Outputs, and gradients of inputs and parameters."""
    x = {kind: table.x.double().requires_grad_() for kind, table in graph.nodes.items()}
    out = call(x)
    random = torch.Generator().manual_seed(1)
    pulls = {kind: torch.randn(out[kind].shape, generator=random, dtype=torch.float64) for kind in x}
    sum((out[kind] * pulls[kind]).sum() for kind in x).backward()
    tensors = {f"out {kind}": out[kind].detach() for kind in x}
    tensors |= {f"x {kind}": torch.zeros_like(rows) if rows.grad is None else rows.grad for kind, rows in x.items()}
    params = module.named_parameters()
    return tensors | {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params}


def compare(ours: torch.nn.Module, theirs: torch.nn.Module, graph: Graph) -> None:
    randomise(ours.double())
    theirs.double().load_state_dict(ours.state_dict())
    view = LocalView.of_graph(graph)
    actual = run(lambda x: ours(view, x), ours, graph)
    expected = run(lambda x: theirs(x, edge_index(graph)), theirs, graph)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kinds", ["sage", "gat", "gin max", "gatv2 sage gat-mean"])
def test_one_conv_per_relation(kinds: str) -> None:
    graph = typed_graph()
    compare(hetero_conv(nn, graph, kinds), hetero_conv(pyg, graph, kinds), graph)


@pytest.mark.parametrize("width", [4, 8])
def test_hgt(width: int) -> None:
    graph = typed_graph()
    metadata = list(graph.nodes), list(graph.edges)
    compare(nn.HGTConv(4, width, metadata, heads=2), pyg.HGTConv(4, width, metadata, heads=2), graph)


@pytest.mark.parametrize("name", HETERO_MODELS)
def test_a_model_uses_every_parameter_and_saves_itself(name: str, tmp_path: Any) -> None:
    for graph in (typed_graph(), related_graph()):
        config = nn.ModelConfig(name=name, hidden=8, layers=2, heads=2, norm="batch", residual=True)
        model = nn.build_model(config, graph).double()
        view = LocalView.of_graph(graph).with_step(key=DrawKey(seed=3))
        x = {kind: table.x.double() for kind, table in graph.nodes.items()}
        features: Any = x if len(x) > 1 else next(iter(x.values()))
        model(view, features).square().sum().backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert len(x) > 1 or not unused, "with several types, some rows do not reach the target"
        nn.save_model(model, tmp_path / "model")
        again = nn.load_model(tmp_path / "model")
        assert torch.equal(again(view, features), model.eval()(view, features))


def test_what_a_relation_does_not_take_is_refused() -> None:
    kind = EdgeType("a", "to", "b")
    for conv in (nn.GCNConv(4, 4), nn.SAGEConv(4, 4, project=True), nn.GATConv(4, 4)):
        with pytest.raises(ConfigError, match=r"a relation takes SAGEConv .* found \w+Conv for a:to:b"):
            nn.HeteroConv({kind: conv})
    with pytest.raises(ConfigError, match="lacks: a:to:b"):
        nn.HeteroConv({kind: nn.SAGEConv(4, 4)})(LocalView.of_graph(related_graph()), {})
    with pytest.raises(ConfigError, match="hetero-sage aggregates by mean or max"):
        nn.HeteroSAGE(aggr="pool")
    with pytest.raises(ConfigError, match="multiple of heads"):
        nn.HGT(hidden=10)
    with pytest.raises(ConfigError, match="use one of rgcn, hetero-sage"):
        nn.build_model(nn.GAT(), typed_graph())
