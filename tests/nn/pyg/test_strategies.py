"""An unchanged module, layer by layer, in strategies on two workers: training equals that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.nn.base import Model
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph, plain_graph
from tests.ranks import RankPool
from tests.strategies.pipe_runs import pipe

FILE = """
import torch, torch_geometric.nn as pyg

class Net(torch.nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.enter = torch.nn.Linear(width, 8)
        self.convs = torch.nn.ModuleList([pyg.GCNConv(8, 8), pyg.GraphConv(8, 8), pyg.TransformerConv(8, 8)])
        self.jump, self.out = pyg.JumpingKnowledge("cat"), torch.nn.Linear(24 + width, out)

    def forward(self, x, edge_index, edge_weight):
        h, outputs = self.enter(x), []
        for index, conv in enumerate(self.convs):
            new = conv(h, edge_index) if index == 2 else conv(h, edge_index, edge_weight)
            h = h + torch.nn.functional.dropout(torch.relu(new), 0.3, self.training)
            outputs.append(h)
        return self.out(torch.cat([self.jump(outputs), x], 1))

def make(config, graph, out):
    return Net(graph.single_nodes.x.shape[1], out)

def library(kind):
    def build(config, graph, out):
        torch.manual_seed(3)
        return kind(graph.single_nodes.x.shape[1], 8, 2, out, dropout=0.2)
    return build

gcn, sage, gin = map(library, (pyg.GCN, pyg.GraphSAGE, pyg.GIN))
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "sar": {"restrict_rows": True},
    "macrobatch": {"fanouts": [2, 3, 2], "batch": 7, "cache_inputs": False},
}


CACHED: dict[str, dict[str, Any]] = {
    "sar": {"cache_inputs": True},
    "macrobatch": {"fanouts": [2, 3], "batch": 7, "cache_inputs": True},
}
LIBRARY = ("gcn", "sage", "gin")


def settings(file: str, strategy: dict[str, Any], factory: str = "make") -> dict[str, Any]:
    model = {"name": f"{file}:{factory}", "execution": "layers"}
    return {"model": model, "strategy": strategy, "precision": "float64", "seed": 5, "train": {"lr": 0.02}}


def outcome(strategy: Any) -> dict[str, Any]:
    assert strategy.model.num_layers > 1
    losses = [record.loss for epoch in range(1) for record in strategy.train_epoch(epoch)]
    result = {"losses": torch.tensor(losses), "weights": strategy.state_dict()["model"]}
    result = {**result, "logits": strategy.predict().logits}
    strategy.close()
    return result


def on_rank(world: World, folder: str, file: str) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for name, options in STRATEGIES.items():
        context = RankContext(world, Partition.open(f"{folder}/parts").shard(world.rank))
        config = resolve({**settings(file, {"name": name, **options}), "workers": world.size})
        outcomes[name] = outcome(build(open_store(f"{folder}/store"), config, context=context).strategy)
    for factory in LIBRARY:
        for name, options in CACHED.items():
            context = RankContext(world, Partition.open(f"{folder}/parts").shard(world.rank))
            config = resolve({**settings(file, {"name": name, **options}, factory), "workers": world.size})
            outcomes[f"{factory} {name}"] = outcome(
                build(open_store(f"{folder}/store"), config, context=context).strategy
            )
    for partitions in (1, 2):
        run = settings(file, {"exactness_check_every": 0})
        outcomes[f"pipe {partitions}"] = outcome(
            pipe(f"{folder}/store", world, chunks=partitions, partitions=partitions, **run)
        )
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    (path / "net.py").write_text(FILE)
    save_store(plain_graph(), path / "store")
    cut_graph(plain_graph(), 2, "random", path / "parts")
    return path


def test_training_on_two_workers_equals_one_process(pool: RankPool, folder: Path) -> None:
    file = str(folder / "net.py")
    outcomes = pool.run(2, on_rank, str(folder), file)[0]

    def local(options: dict[str, Any], factory: str = "make") -> dict[str, Any]:
        config = resolve(settings(file, {"name": "local", "order": "store", **options}, factory))
        return outcome(build(open_store(folder / "store"), config).strategy)

    full, sampled = local({}), local(STRATEGIES["macrobatch"])
    assert not torch.allclose(full["logits"], sampled["logits"])
    expectations = {"macrobatch": sampled}
    for factory in LIBRARY:
        expectations[f"{factory} sar"] = local({"cache_inputs": False}, factory)
        expectations[f"{factory} macrobatch"] = local(CACHED["macrobatch"], factory)
        torch.testing.assert_close(local({"cache_inputs": True}, factory), expectations[f"{factory} sar"])
    for name, actual in outcomes.items():
        expected = expectations.get(name, full)
        torch.testing.assert_close(actual["logits"], expected["logits"], rtol=1e-10, atol=1e-10, msg=name)
        for weight, value in expected["weights"].items():
            torch.testing.assert_close(actual["weights"][weight], value, rtol=1e-10, atol=1e-10, msg=f"{name} {weight}")


def test_evaluation_in_chunks_of_rows_is_exact(folder: Path) -> None:
    logits = []
    for limit in (1 << 30, 4000):
        config = resolve({**settings(str(folder / "net.py"), {"name": "local"}), "evaluation_memory": limit})
        strategy: Any = build(open_store(folder / "store"), config).strategy
        logits.append(strategy.predict().logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-10, atol=1e-10)


def test_pipe_refuses_running_statistics_of_norms_without_weights() -> None:
    model = Model([torch.nn.BatchNorm1d(3, affine=False)])
    with pytest.raises(ConfigError, match=r"layers\.0 \(BatchNorm1d\) has none: set affine=True"):
        PipeConfig().check_model(model)
    PipeConfig().check_model(Model([torch.nn.BatchNorm1d(3)]))
