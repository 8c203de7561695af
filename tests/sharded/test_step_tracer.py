"""A traced step predicts a real one: the bytes it sends exactly, its memory to 25 %."""

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
from tests.equivalence.test_sar import run_settings
from tests.ranks import RankPool

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
    """(bytes predicted, bytes sent, batch norms) of a step by this rank, without the sums of gradients."""
    steps = []
    for model in models:
        context = RankContext(world, Partition.open(parts).shard(world.rank))
        settings = run_settings(model, name="sar", restrict_rows=False, cache_for_backward=keep) | {
            "train": {"optimizer": "sgd"}
        }
        strategy: Any = build(open_store(store), resolve(settings), context=context).strategy
        blocks = strategy._view.blocks
        predicted = 0
        for exchange in strategy._memory_needs().trace.exchanges:
            for route, row_bytes in () if keep and exchange.is_refetch else exchange.sent_bytes:
                predicted += row_bytes * sum(map(len, blocks.exchange_plan(*route).send_rows))
            for route, row_bytes in exchange.returned_bytes:
                predicted += row_bytes * sum(blocks.exchange_plan(*route).recv_counts)
        before = world.traffic.bytes_sent
        list(strategy.train_epoch(0))
        sent = world.traffic.bytes_sent - before
        replicated = list(strategy._replicated)
        sums = (
            8 * (sum(parameter.numel() for parameter in replicated) + len(replicated)) + 8 + 8
        )  # with the count and the loss
        norms = [module for module in strategy.model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
        steps.append((predicted, sent - (sums if world.size > 1 else 0), len(norms)))
    return steps


@pytest.mark.parametrize(
    ("make", "models"),
    [(plain_graph, MODELS), (typed_graph, [{"name": "rgcn"}, {"name": "hetero-sage"}, {"name": "hgt"}])],
)
@pytest.mark.parametrize("keep", [False, True])
def test_sent_bytes_are_predicted_exactly(
    pool: RankPool, tmp_path: Path, make: Any, models: list[Any], keep: bool
) -> None:
    store = save_store(make(), tmp_path / "store")
    parts = cut_graph(store, 3, "random", tmp_path / "parts")
    for steps in pool.run(3, predicted_and_sent, str(tmp_path / "store"), str(parts), models, keep):
        for model, (predicted, sent, norms) in zip(models, steps, strict=True):
            if norms:  # statistics are sent too: a few numbers for each column
                assert predicted < sent < predicted + norms * 4000, model
            else:
                assert predicted == sent, model


@pytest.mark.parametrize("model", [{"name": "sage"}, {"name": "gat", "heads": 4}, {"name": "gcn", "norm": "layer"}])
def test_memory_of_a_step_is_predicted(tmp_path: Path, model: dict[str, Any]) -> None:
    save_store(make_dataset("communities", nodes=30_000, mean_degree=10, features=32), tmp_path / "store")
    parts = cut_graph(open_store(tmp_path / "store"), 1, "range", tmp_path / "parts")
    settings = {
        "model": {"hidden": 64, "layers": 3, "dropout": 0.2, **model},
        "strategy": {"name": "sar", "restrict_rows": False},
    }
    context = RankContext(World(), Partition.open(parts).shard(0))
    strategy: Any = build(open_store(tmp_path / "store"), resolve(settings), context=context).strategy
    with unpooled():
        measured = peak_tensors(lambda: list(strategy.train_epoch(0)))
    assert strategy._memory_needs().peak_bytes == pytest.approx(measured, rel=0.25)


def test_a_memory_limit_below_the_minimum_is_refused(tmp_path: Path) -> None:
    save_store(plain_graph(), tmp_path / "store")
    parts = cut_graph(open_store(tmp_path / "store"), 1, "range", tmp_path / "parts")
    settings = {"strategy": {"name": "sar"}, "memory": "1MB"}
    context = RankContext(World(), Partition.open(parts).shard(0))
    strategy = build(open_store(tmp_path / "store"), resolve(settings), context=context).strategy
    with pytest.raises(ConfigError, match=r"a worker needs at least .* \(group 1, prefetch 0\), found --memory 1 MiB"):
        list(strategy.train_epoch(0))
