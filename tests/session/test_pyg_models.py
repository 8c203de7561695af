"""torch_geometric modules from a model file, through whole runs: the same on one process and on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gnnfleet as gf
from gnnfleet.errors import ConfigError
from gnnfleet.graph.store import open_store
from tests.graphs import communities
from tests.shell import run_json

MODEL_FILE = """
import torch
import torch_geometric.nn as pyg


def gcn(config, graph, out_channels):
    return pyg.GCN(graph.single_nodes.x.shape[1], config.hidden, 2, out_channels, dropout=0.3, norm="batch")


def gat(config, graph, out_channels):
    return pyg.GAT(graph.single_nodes.x.shape[1], config.hidden, 2, out_channels, heads=2, dropout=0.3)


class TwoHops(torch.nn.Module):
    def __init__(self, width, out_channels):
        super().__init__()
        self.conv = pyg.TAGConv(width, out_channels, K=2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def two_hops(config, graph, out_channels):
    return TwoHops(graph.single_nodes.x.shape[1], out_channels)


class Centred(torch.nn.Module):
    def __init__(self, width, out_channels):
        super().__init__()
        self.conv = pyg.SAGEConv(width, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x - x.mean(0), edge_index)


def centred(config, graph, out_channels):
    return Centred(graph.single_nodes.x.shape[1], out_channels)


def needs_positions(config, graph, out_channels):
    return pyg.PointNetConv()
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mine.py"
    path.write_text(MODEL_FILE)
    return path


@pytest.fixture(scope="module")
def graph() -> gf.Graph:
    return communities()


def trained(graph: gf.Graph, model: str, **options: Any) -> gf.Record:
    return gf.train(
        graph, model={"name": model, "hidden": 8}, epochs=4, precision="float64", optimizer="sgd", seed=3, **options
    )


@pytest.mark.parametrize("factory", ["gcn", "gat"])
def test_a_module_trains_on_workers_as_in_one_process(graph: gf.Graph, model_file: Path, factory: str) -> None:
    """Dropout draws by node and edge, batch norm is over all workers: losses and all weights are equal.

    With SGD: a bias before batch norm has a gradient of rounding only, which Adam scales to full steps.
    """
    local = trained(graph, f"{model_file}:{factory}")
    spread = trained(graph, f"{model_file}:{factory}", strategy="sar", workers=2)
    assert spread.metrics["train_loss"] == pytest.approx(local.metrics["train_loss"], rel=1e-9)
    for name, weight in local.model.state_dict().items():
        torch.testing.assert_close(spread.model.state_dict()[name], weight, rtol=1e-9, atol=1e-9)
    assert spread.predict() == local.predict()


def test_a_run_of_a_module_is_resumed_and_queried(graph: gf.Graph, model_file: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "sar", "workers": 2}
    whole = trained(graph, f"{model_file}:gcn", **options)
    gf.train(
        graph, model={"name": f"{model_file}:gcn", "hidden": 8}, epochs=2, precision="float64", optimizer="sgd", seed=3,
        run_dir=tmp_path / "run", **options,
    )  # fmt: skip
    resumed = trained(graph, f"{model_file}:gcn", run_dir=tmp_path / "run", resume=True, **options)
    assert resumed.metrics == whole.metrics
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_a_module_is_evaluated_from_its_run(store: Path, model_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    record = run_json("train", store, "--model", f"{model_file}:gcn", "--set", "train.epochs=2", "--run-dir", run)
    evaluated = run_json("evaluate", run, "--split", "test")
    assert evaluated["value"] == record["metrics"]["test"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, graph: gf.Graph) -> Path:
    from gnnfleet.graph.store import save_store

    path = tmp_path_factory.mktemp("stores") / "graph"
    save_store(graph, path)
    assert open_store(path).num_nodes == graph.num_nodes
    return path


@pytest.mark.parametrize("strategy", ["macrobatch", "pipe", "tma", {"name": "local", "fanouts": [3]}])
def test_strategies_that_run_layers_refuse_a_whole_module(graph: gf.Graph, model_file: Path, strategy: Any) -> None:
    workers = 1 if isinstance(strategy, dict) else 2
    with pytest.raises(ConfigError, match="TAGConv passes messages more than once in a call"):
        trained(graph, f"{model_file}:two_hops", strategy=strategy, workers=workers)


def test_a_plan_for_a_whole_module_has_full_batch_strategies_only(store: Path, model_file: Path) -> None:
    plan = run_json("plan", store, "--model", f"{model_file}:two_hops", "--workers", "2", "--bandwidth", "1Gbit")
    assert {estimate["settings"]["name"] for estimate in plan["fits"]} == {"local", "sar"}
    assert {estimate["settings"]["name"] for estimate in plan["refused"]} == {"macrobatch", "tma", "pipe"}


def test_a_module_that_depends_on_the_partition_is_refused_before_training(graph: gf.Graph, model_file: Path) -> None:
    """A mean over all nodes is local to a part: the self-check finds it; one process trains it."""
    with pytest.raises(ConfigError, match=r"Centred on 2 parts of a graph differs .* in the output"):
        trained(graph, f"{model_file}:centred", strategy="sar", workers=2)
    assert trained(graph, f"{model_file}:centred").metrics["train_loss"] > 0


def test_a_module_with_other_inputs_is_refused(graph: gf.Graph, model_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"PointNetConv\.forward needs pos"):
        trained(graph, f"{model_file}:needs_positions")


def test_train_takes_the_data_of_torch_geometric() -> None:
    from torch_geometric.data import Data

    x = torch.eye(6)
    data = Data(x=x, edge_index=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]), y=torch.tensor([0, 1, 0, 1, 0, 1]))
    record = gf.train(data, split="0.5/0.25/0.25", epochs=1, seed=0)
    assert len(record.predict()) == 6
