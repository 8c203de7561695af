"""Models called with tensors, exported to torch_geometric, and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnnfleet import nn
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.model import GNN
from gnnfleet.nn.pyg.module import PygModule
from tests.nn.peers import randomise

CONFIGS = [
    *(nn.SAGE(hidden=8, aggr=aggr) for aggr in ("mean", "max", "pool")),
    nn.GCN(hidden=8, norm="batch", dropout=0.0),
    nn.GCN(hidden=8, layers=1),
    nn.GIN(hidden=8, norm="layer", train_eps=True, act="elu"),
    nn.GAT(hidden=8, heads=2, out_heads=3, norm="layer", attention_dropout=0.3),
    nn.GATv2(hidden=8, heads=2, residual=True, layers=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.layers}-{config.aggr}")
def test_models_called_with_tensors_equal_their_export_and_their_file(config: nn.ModelConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    index, x = torch.randint(0, 30, (2, 120)), torch.randn(30, 7, dtype=torch.float64)
    index = index[:, index[0] != index[1]]
    model = GNN(config, 7, 5).double().eval()
    randomise(model)
    with torch.no_grad():
        out = model(x, index)
        torch.testing.assert_close(nn.to_pyg(model)(x, index), out, rtol=1e-10, atol=1e-10)
        assert torch.equal(model(LocalView.of_graph(Graph(index, num_nodes=30)).with_step(training=False), x), out)
    nn.save_model(model, tmp_path / "model")
    assert torch.equal(nn.load_model(tmp_path / "model")(x, index), out)
    pyg = nn.to_pyg(model.train())
    assert pyg.training and not pyg.eval().training
    if config.dropout and config.layers > 1:
        assert not torch.equal(model(x, index), model(x, index))  # dropout of a training step of one's own
    model.load_state_dict(pyg.state_dict())


def test_edge_weights_and_features_are_passed_on() -> None:
    torch.manual_seed(0)
    index, x, weight = torch.randint(0, 20, (2, 60)), torch.randn(20, 4), torch.rand(60)
    index = index[:, index[0] != index[1]]
    weight, attr = weight[: index.shape[1]], torch.randn(index.shape[1], 3)
    gcn, gat = GNN(nn.GCN(hidden=8), 4, 3).eval(), GNN(nn.GAT(hidden=8), 4, 3, edge_dim=3).eval()
    torch.testing.assert_close(gcn(x, index, weight), nn.to_pyg(gcn)(x, index, weight))
    torch.testing.assert_close(gat(x, index, edge_attr=attr), nn.to_pyg(gat)(x, index, edge_attr=attr))
    wrapped = PygModule(nn.to_pyg(gcn))
    assert nn.to_pyg(wrapped) is wrapped.module and torch.equal(
        wrapped(x, index, weight), wrapped.module(x, index, weight)
    )


def test_models_without_a_counterpart_are_refused(tmp_path: Path) -> None:
    for config, reason in (
        (nn.GCN2(), "no model like gcn2"),
        (nn.GCN(residual=True), "no residual"),
        (nn.SAGE(input_norm="sum"), "none that changes its input"),
        (nn.SAGE(embedding=4), "no models with learnable node embeddings"),
    ):
        with pytest.raises(ConfigError, match=reason):
            nn.to_pyg(GNN(config, 7, 5, num_nodes={"node": 9}))
    with pytest.raises(ConfigError, match=r"torch\.save\(model\.state_dict"):
        nn.save_model(nn.Model([torch.nn.Linear(2, 2)]), tmp_path / "model")
