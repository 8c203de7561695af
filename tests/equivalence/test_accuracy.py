"""Real graphs: the metrics of any number of ranks are those of local, in float64 digit by digit, in float32 nearly."""

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
from tests.ranks import Crew

EPOCHS = 8


def metrics(world: World, store: str, parts: str | None, precision: str) -> list[dict[str, float]]:
    here = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    model = {"name": "gcn", "hidden": 16, "layers": 2, "dropout": 0.5, "input_norm": "sum"}
    strategy = "local" if parts is None else "sar"
    tree: dict[str, Any] = {"model": model, "precision": precision, "strategy": strategy, "seed": 1}
    made = build(open_store(store), resolve(tree), context=here).strategy
    for epoch in range(EPOCHS):
        list(made.train_epoch(epoch))
    return [made.evaluate(split) for split in ("train", "val", "test")]


@pytest.mark.parametrize("name", ["cora", "pubmed"])
def test_same_metrics_on_any_number_of_ranks(crew: Crew, shared_data: Path, tmp_path: Path, name: str) -> None:
    graph = save_store(read_npz(shared_data / "static" / f"{name}.npz"), tmp_path / name)
    wanted, rounded = (metrics(World(), str(tmp_path / name), None, word) for word in ("float64", "float32"))
    assert wanted[2]["accuracy"] > 0.4
    for size in (2, 4):
        parts = cut_graph(graph, size, "range" if size == 4 else "random", tmp_path / f"parts-{size}")
        for found in crew.run(size, metrics, str(tmp_path / name), str(parts), "float64"):
            for one, other in zip(found, wanted, strict=True):
                assert one["accuracy"] == other["accuracy"] and one["count"] == other["count"]
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-10)
        for found in crew.run(size, metrics, str(tmp_path / name), str(parts), "float32"):
            for one, other in zip(found, rounded, strict=True):  # far nearer than two seeds are
                assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.005) and one["count"] == other["count"]
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
