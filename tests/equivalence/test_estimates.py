"""Estimated bytes and rounds of an epoch equal those that ranks count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.graph.partition.node_assignment import NodeAssignment
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.sharded.full_batch.active_row_counts import LayerLoad, count_active_rows
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.estimates import (
    CostEstimate,
    EventPlanningContext,
    MachineProfile,
    PlanningContext,
    TrialTiming,
)
from gnnfleet.strategies.registry import build_strategy, estimate_costs
from gnnfleet.strategies.temporal.layout_planner import all_layouts
from gnnfleet.training.build import RankContext, build, make_event_job, make_job, validate
from tests.equivalence.spread import cut_graph, plain_graph, typed_graph
from tests.equivalence.test_sar import run_settings
from tests.ranks import RankPool, with_shm_transport

SAR: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "sage"}, {"group": 1}),
    ({"name": "sage", "embedding": 4, "aggr": "max"}, {"group": 3, "prefetch": 0}),
    ({"name": "gcn", "norm": "batch"}, {"group": 2}),
    ({"name": "gat", "heads": 2, "edge_features": True}, {"cache_for_backward": True}),
]
PIPE: list[tuple[dict[str, Any], int, int, int]] = [
    ({"name": "sage"}, 3, 3, 3),
    ({"name": "gcn2", "layers": 4}, 4, 2, 8),
]


def planning_context(
    store: Path, settings: dict[str, Any], parts: Path | None = None
) -> tuple[PlanningContext, RunConfig]:
    """(the inputs of an estimate with an invented machine profile, the config)."""
    graph, config = open_store(store), resolve(settings)
    profile = MachineProfile(config.workers, 1e-6, 1e-7, 1e-6, 1e-7, base_memory=3e8)

    def shards() -> list[Any]:
        assert parts is not None
        return [Partition.open(parts).shard(part) for part in range(config.workers)]

    context = PlanningContext(
        job=make_job(validate(graph, config), config, RankContext()),
        single_profile=profile,
        shared_profile=profile,
        overlaps=False,
        parts=shards,
        assignment=lambda _: NodeAssignment({kind: table.count for kind, table in graph.nodes.items()}, None),
        layouts=lambda strategy: [
            build_chunk_layout(graph, *sizes) for sizes in strategy.layout_candidates(config.workers)
        ],
    )
    return context, config


def estimates_of(store: Path, settings: dict[str, Any], parts: Path | None = None) -> list[CostEstimate]:
    context, config = planning_context(store, settings, parts)
    return estimate_costs(config.strategy, context)


def count_traffic(
    world: World, store: str, settings_list: list[dict[str, Any]], parts: str | None
) -> list[tuple[int, int]]:
    """(bytes, rounds) of this rank in an epoch that is not the first."""
    traffic = []
    for settings in settings_list:
        graph, config = open_store(store), resolve(settings)
        if parts is None:
            context = RankContext(
                world,
                layouts=[build_chunk_layout(graph, *sizes) for sizes in config.strategy.layout_candidates(world.size)],
            )
        else:
            context = RankContext(world, Partition.open(parts).shard(world.rank))
        strategy = build(graph, config, context=context).strategy
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent, world.traffic.rounds
        list(strategy.train_epoch(1))
        traffic.append((world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]))
    return traffic


def sar_settings(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    return run_settings(model, name="sar", **options) | {"workers": 3}


@pytest.mark.parametrize(("make", "cases"), [(plain_graph, SAR), (typed_graph, [({"name": "rgcn"}, {"group": 1})])])
def test_traffic_of_sar_is_as_estimated(pool: RankPool, tmp_path: Path, make: Any, cases: list[Any]) -> None:
    store = save_store(make(), tmp_path / "store")
    parts = cut_graph(store, 3, "random", tmp_path / "parts")
    settings_list = [
        sar_settings(model, **{"prefetch": 1, "group": 1, "cache_for_backward": False, **options})
        for model, options in cases
    ]
    ranks = pool.run(3, count_traffic, str(tmp_path / "store"), settings_list, str(parts))
    for index, settings in enumerate(settings_list):
        (estimate,) = estimates_of(tmp_path / "store", settings, parts)
        assert estimate.bytes == sum(rank[index][0] for rank in ranks), settings
        assert {rank[index][1] for rank in ranks} == {estimate.rounds}, settings


def test_traffic_of_pipe_is_as_estimated(pool: RankPool, tmp_path: Path) -> None:
    store = save_store(plain_graph(), tmp_path / "store")
    for model, workers, graph_parallel, chunks in PIPE:
        settings = run_settings(
            model, name="pipe", graph_parallel=graph_parallel, chunks=chunks, exactness_check_every=0
        ) | {"workers": workers}
        parts = cut_graph(store, workers, "range", tmp_path / f"parts-{workers}")
        (estimate,) = estimates_of(tmp_path / "store", settings, parts)
        ranks = pool.run(workers, count_traffic, str(tmp_path / "store"), [settings], None)
        assert estimate.bytes == sum(rank[0][0] for rank in ranks), model
        if graph_parallel == workers:  # the assignment of layers to several stages depends on measured times
            assert estimate.rounds == max(rank[0][1] for rank in ranks), model
        assert estimate.kind == ("exact" if graph_parallel == chunks else "approximate")


def count_event_traffic(world: World, store: str, settings: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(steps, bytes, rounds) of this rank in the second epoch of every parallel layout."""
    config, graph = resolve(settings), open_store(store)
    context = RankContext(with_shm_transport(world))
    counts = []
    for layout in all_layouts(world.size):
        strategy_config = config.strategy.model_copy(update=vars(layout))
        strategy = build_strategy(strategy_config, make_event_job(graph, config, context))
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent, world.traffic.rounds
        steps = len(list(strategy.train_epoch(1)))
        counts.append((steps, world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]))
    return counts


def test_event_traffic_is_as_estimated_except_at_the_start_of_a_sweep(pool: RankPool, tmp_path: Path) -> None:
    graph = make_dataset("events", users=40, items=20, events=900, features=2, seed=3)
    save_store(graph, tmp_path / "store")
    strategy = {"name": "temporal", "batch": 20, "static": False, "eval_negatives": 3}
    settings = {"strategy": strategy, "model": {"hidden": 8, "neighbours": 3}, "workers": 2}
    config = resolve(settings)

    def run_trials(workers: int, candidates: Sequence[tuple[StrategyConfig, int]]) -> list[TrialTiming]:
        return [TrialTiming(1.0, 1e8) for _ in candidates]

    job = make_event_job(open_store(tmp_path / "store"), config, RankContext())
    alone, *estimates = estimate_costs(config.strategy, EventPlanningContext(job, 2, run_trials))
    assert alone.workers == 1 and alone.bytes == alone.rounds == 0
    ranks = pool.run(2, count_event_traffic, str(tmp_path / "store"), settings)
    for index, (layout, estimate) in enumerate(zip(all_layouts(2), estimates, strict=True)):
        assert {axis: estimate.settings[axis] for axis in vars(layout)} == vars(layout)
        steps = ranks[0][index][0]
        sent, rounds = sum(rank[index][1] for rank in ranks), max(rank[index][2] for rank in ranks)
        assert abs(estimate.steps - steps) <= 1
        assert steps / estimate.steps * estimate.bytes == pytest.approx(sent, rel=0.01), layout
        assert steps / estimate.steps * estimate.rounds == pytest.approx(rounds, abs=2), layout


def layer_loads(world: World, parts: str, seeds: list[int], layers: int) -> list[LayerLoad]:
    """Collective. Load of each layer on this rank, computed with all ranks."""
    shard = Partition.open(parts).shard(world.rank)
    ring = RingExchange(world)
    is_seed = torch.zeros(60, dtype=torch.bool)
    is_seed[seeds] = True
    active_rows = ActiveRows.compute(shard, ring, {"node": is_seed[shard.nodes("node").store_ids]}, layers)
    view = RingView.open(shard, ring, active_rows)
    loads = []
    for index in range(layers):
        blocks = (view if active_rows is None else view.for_layer(active_rows, index)).blocks
        plans = {("node", direction): blocks.exchange_plan("node", direction) for direction in ("in", "out")}
        edges = sum(relation.num_edges for relation in blocks.edges.values())
        rows = blocks.nodes["node"].num_dst
        send_counts = {direction: sum(map(len, plan.send_rows)) for direction, plan in plans.items()}
        loads.append(
            LayerLoad(rows, edges, send_counts, {direction: sum(plan.recv_counts) for direction, plan in plans.items()})
        )
    return loads


@pytest.mark.parametrize("seeds", [[3], [1, 5, 40], list(range(50))])
def test_loads_computed_alone_equal_those_of_ranks(pool: RankPool, tmp_path: Path, seeds: list[int]) -> None:
    parts = cut_graph(plain_graph(), 3, "random", tmp_path / "parts")
    shards = [Partition.open(parts).shard(part) for part in range(3)]
    is_seed = torch.zeros(60, dtype=torch.bool)
    is_seed[seeds] = True
    masks = [{"node": is_seed[shard.nodes("node").store_ids]} for shard in shards]
    ranks = pool.run(3, layer_loads, str(parts), seeds, 3)
    assert count_active_rows(shards, masks, 3).loads == [[rank[layer] for rank in ranks] for layer in range(3)]
