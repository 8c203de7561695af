"""What a scouted step says of the real one: the bytes it will send, exactly, and its memory, nearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.memory import peak_tensors
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph, plain_graph, typed_graph
from tests.equivalence.test_sar import words
from tests.ranks import Crew

MODELS: list[dict[str, Any]] = [
    {"name": "sage"},
    {"name": "sage", "embedding": 4, "aggr": "max"},
    {"name": "gcn", "norm": "batch"},
    {"name": "gat", "heads": 2, "edge_features": True},
    {"name": "gatv2", "heads": 2},
    {"name": "gin"},
]


def predicted_and_sent(
    world: World, store: str, parts: str, models: list[Any], keep: bool
) -> list[tuple[int, int, int]]:
    """(bytes foreseen, bytes sent) of a step by this rank, without the sums of gradients."""
    found = []
    for model in models:
        here = RankContext(world, Partition.open(parts).shard(world.rank))
        tree = words(model, name="sar", restrict_rows=False, cache_for_backward=keep) | {"train": {"optimizer": "sgd"}}
        strategy: Any = build(open_store(store), resolve(tree), here=here).strategy
        part = strategy._view.part
        foreseen = 0
        for trip in strategy._needs().sketch.exchanges:
            for way, each in () if keep and trip.is_refetch else trip.sent_bytes:
                foreseen += each * sum(len(rows) for rows in part.routes(*way).give)
            for way, each in trip.returned_bytes:
                foreseen += each * sum(part.routes(*way).need)
        before = world.traffic.bytes_sent
        list(strategy.train_epoch(0))
        sent = world.traffic.bytes_sent - before
        common = list(strategy._common)
        sums = 8 * (sum(parameter.numel() for parameter in common) + len(common)) + 8 + 8  # with the count and the loss
        norms = [module for module in strategy.model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
        found.append((foreseen, sent - (sums if world.size > 1 else 0), len(norms)))
    return found


@pytest.mark.parametrize(("make", "models"), [(plain_graph, MODELS), (typed_graph, [{"name": "rgcn"}])])
@pytest.mark.parametrize("keep", [False, True])
def test_bytes_are_foreseen(crew: Crew, tmp_path: Path, make: Any, models: list[Any], keep: bool) -> None:
    store = save_store(make(), tmp_path / "store")
    parts = cut_graph(store, 3, "random", tmp_path / "parts")
    for found in crew.run(3, predicted_and_sent, str(tmp_path / "store"), str(parts), models, keep):
        for model, (foreseen, sent, norms) in zip(models, found, strict=True):
            if norms:  # statistics travel too: a few numbers for each column
                assert foreseen < sent < foreseen + norms * 4000, model
            else:
                assert foreseen == sent, model


@pytest.mark.parametrize("model", [{"name": "sage"}, {"name": "gat", "heads": 4}, {"name": "gcn", "norm": "layer"}])
def test_memory_is_foreseen(tmp_path: Path, model: dict[str, Any]) -> None:
    save_store(make_dataset("communities", nodes=30_000, mean_degree=10, features=32), tmp_path / "store")
    parts = cut_graph(open_store(tmp_path / "store"), 1, "range", tmp_path / "parts")
    tree = {
        "model": {"hidden": 64, "layers": 3, "dropout": 0.2, **model},
        "strategy": {"name": "sar", "restrict_rows": False},
    }
    here = RankContext(World(), Partition.open(parts).shard(0))
    strategy: Any = build(open_store(tmp_path / "store"), resolve(tree), here=here).strategy
    with unpooled():
        measured = peak_tensors(lambda: list(strategy.train_epoch(0)))
    assert strategy._needs().tensors == pytest.approx(measured, rel=0.25)


def test_nothing_fits(tmp_path: Path) -> None:
    save_store(plain_graph(), tmp_path / "store")
    parts = cut_graph(open_store(tmp_path / "store"), 1, "range", tmp_path / "parts")
    tree = {"strategy": {"name": "sar"}, "memory": "1MB"}
    here = RankContext(World(), Partition.open(parts).shard(0))
    strategy = build(open_store(tmp_path / "store"), resolve(tree), here=here).strategy
    with pytest.raises(ConfigError, match=r"a worker needs .* at least \(group 1, prefetch 0\), found --memory 1 MiB"):
        list(strategy.train_epoch(0))
