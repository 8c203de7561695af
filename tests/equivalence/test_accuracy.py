"""Metrics on real graphs are equal for any number of ranks: exact in float64, close in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.ingest.npz import read_npz
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph
from tests.ranks import RankPool

EPOCHS = 8


def metrics(world: World, store: str, parts: str | None, precision: str) -> list[dict[str, float]]:
    context = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    model = {"name": "gcn", "hidden": 16, "layers": 2, "dropout": 0.5, "input_norm": "sum"}
    strategy = "local" if parts is None else "sar"
    settings: dict[str, Any] = {"model": model, "precision": precision, "strategy": strategy, "seed": 1}
    strategy = build(open_store(store), resolve(settings), context=context).strategy
    for epoch in range(EPOCHS):
        list(strategy.train_epoch(epoch))
    return [strategy.evaluate(split) for split in ("train", "val", "test")]


@pytest.mark.parametrize("name", ["cora", "pubmed"])
def test_same_metrics_on_any_number_of_ranks(pool: RankPool, shared_data: Path, tmp_path: Path, name: str) -> None:
    graph = save_store(read_npz(shared_data / "static" / f"{name}.npz"), tmp_path / name)
    exact, rounded = (metrics(World(), str(tmp_path / name), None, precision) for precision in ("float64", "float32"))
    assert exact[2]["accuracy"] > 0.4
    for size in (2, 4):
        parts = cut_graph(graph, size, "range" if size == 4 else "random", tmp_path / f"parts-{size}")
        for splits in pool.run(size, metrics, str(tmp_path / name), str(parts), "float64"):
            for actual, expected in zip(splits, exact, strict=True):
                assert actual["accuracy"] == expected["accuracy"] and actual["count"] == expected["count"]
                assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        for splits in pool.run(size, metrics, str(tmp_path / name), str(parts), "float32"):
            for actual, expected in zip(splits, rounded, strict=True):  # much closer than runs of two seeds
                assert actual["accuracy"] == pytest.approx(expected["accuracy"], abs=0.005)
                assert actual["count"] == expected["count"]
                assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-3)
