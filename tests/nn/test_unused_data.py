"""Edge weights and features change every model that claims to use them; remarks name what the others leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

from gnnfleet import nn
from gnnfleet.api import train
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Model
from gnnfleet.nn.config import MODELS, TEMPORAL_MODELS
from gnnfleet.nn.custom_model import build_custom_model, live_modules
from gnnfleet.nn.unused_data import describe_unused
from gnnfleet.planner.planner import make_plan
from tests.nn.peers import random_graph

VARIANTS = [(name, "mean") for name in MODELS] + [("sage", "max"), ("sage", "pool")]


def graph_with(*data: str) -> Graph:
    graph = random_graph()
    edges = graph.single_edges
    kept = {"edge_weight": edges.weight, "edge_attr": edges.attr}
    return Graph(
        edges.edge_index(), x=graph.single_nodes.x, y=graph.single_nodes.y, num_nodes=30, **{n: kept[n] for n in data}
    )


def rows(graph: Graph, config: nn.ModelConfig) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.build_model(config, graph)
    torch.manual_seed(1)
    for parameter in (p for _, p in sorted(model.named_parameters()) if p.dim()):
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()(LocalView.of_graph(graph).with_step(training=False), graph.single_nodes.x)


@pytest.mark.parametrize(("name", "aggr"), VARIANTS)
def test_what_is_not_used_is_said_and_what_is_used_counts(name: str, aggr: str) -> None:
    config = nn.ModelConfig(name=name, hidden=8, heads=2, layers=2, aggr=aggr)
    for data, switch, used in (
        ("edge_weight", "edge_weight", config.uses_edge_weight),
        ("edge_attr", "edge_features", config.uses_edge_features),
    ):
        graph, off = graph_with(data), config.model_copy(update={switch: False})
        changed = graph_with(data)
        values = changed.single_edges.weight if data == "edge_weight" else changed.single_edges.attr
        assert values is not None
        values.mul_(torch.rand(len(values), *[1] * (values.dim() - 1)) + 0.5)
        assert torch.equal(rows(graph, config), rows(changed, config)) is not used, "other values, other rows"
        assert torch.equal(rows(graph, off), rows(graph_with(), config)), "switched off it is as without"
        (remarks, silent) = describe_unused(config, graph), describe_unused(off, graph)
        assert (remarks == ()) is used and silent == ()
        assert used or remarks[0].startswith(
            f"edge {'weights' if data == 'edge_weight' else 'features'} are not used by"
        )


class WeightsOnly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(5, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_weight: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index, edge_weight)


class AsksTheView(Model):
    def compute(self, layer_index: int, view: Any, x: Any, carry: Any) -> Any:
        return self.layers[0](view, x, weight=view.weight), None


def test_custom_models_and_events() -> None:
    graph = graph_with("edge_weight", "edge_attr")

    def remarks(module: torch.nn.Module) -> tuple[str, ...]:
        config = nn.ModelConfig(name=f"live:{type(module).__name__}:1")
        live_modules[config.name] = module
        return describe_unused(config, graph, build_custom_model(config, graph, out_channels=3))

    assert remarks(WeightsOnly()) == (
        "edge features are not used by model WeightsOnly: WeightsOnly.forward has no argument edge_attr",
    )
    assert len(remarks(Model([nn.SAGEConv(5, 3)]))) == 2
    assert remarks(AsksTheView([nn.GCNConv(5, 3)])) == ()
    for name in TEMPORAL_MODELS:
        assert describe_unused(nn.ModelConfig(name=name), graph) == (f"edge weights are not used by model {name}",)


def test_train_and_plan_say_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gnnfleet")
    graph = graph_with("edge_weight", "edge_attr")
    settings = {"model": {"name": "gcn", "hidden": 4, "layers": 1}, "split": "0.6/0.2/0.2", "train": {"epochs": 1}}
    remark = "edge features are not used by model gcn: sage, gin, gat, gatv2 and res+ use them"
    train(graph, quiet=False, strategy="local", **settings)
    assert caplog.text.count(remark) == 1
    assert make_plan(graph, {**settings, "workers": 1}).remarks == (remark,)
