"""Twelve complete torch_geometric models train with sar on two workers as in one process, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph, plain_graph
from tests.ranks import RankPool

FILE = Path(__file__).parents[3] / "examples" / "models" / "pyg_models.py"
NAMES = ["gcn", "gat", "sage", "gin", "jumping", "appnp", "tag", "spectral", "gcn2", "deeper", "pna", "transformer"]
EPOCHS = 3


def losses(
    name: str, strategy: dict[str, Any], context: RankContext | None = None, dropout: float = 0.3
) -> list[float]:
    model = {"name": f"{FILE}:{name}", "hidden": 8, "dropout": dropout}
    settings = {"model": model, "train": {"lr": 0.02, "optimizer": "sgd"}, "seed": 4, "strategy": strategy}
    run = build(plain_graph(), resolve(settings), context=context).strategy
    values = [record.loss for epoch in range(EPOCHS) for record in run.train_epoch(epoch)]
    run.close()
    return values


def losses_on_rank(world: World, path: str) -> dict[str, list[float]]:
    context = RankContext(world, Partition.open(path).shard(world.rank))
    return {name: losses(name, {"name": "sar"}, context) for name in NAMES}


def test_twelve_models_train_on_two_workers_as_in_one_process(pool: RankPool, tmp_path: Path) -> None:
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    ranks = pool.run(2, losses_on_rank, str(path))
    without = losses("gcn", {"name": "local"}, dropout=0.0)
    assert without != pytest.approx(ranks[0]["gcn"], abs=1e-3)
    for name in NAMES:
        expected = losses(name, {"name": "local", "order": "store"})
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, abs=1e-5), name
