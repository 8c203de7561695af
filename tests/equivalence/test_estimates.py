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
from tests.equivalence.test_sar import words
from tests.ranks import Crew, with_shelf

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


def planning_context(store: Path, tree: dict[str, Any], parts: Path | None = None) -> tuple[PlanningContext, RunConfig]:
    """(the inputs of an estimate with an invented machine profile, the config)."""
    graph, config = open_store(store), resolve(tree)
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


def estimates_of(store: Path, tree: dict[str, Any], parts: Path | None = None) -> list[CostEstimate]:
    context, config = planning_context(store, tree, parts)
    return estimate_costs(config.strategy, context)


def counted(world: World, store: str, trees: list[dict[str, Any]], parts: str | None) -> list[tuple[int, int]]:
    """(bytes, rounds) of this rank in an epoch that is not the first."""
    found = []
    for tree in trees:
        graph, config = open_store(store), resolve(tree)
        if parts is None:
            here = RankContext(
                world,
                layouts=[build_chunk_layout(graph, *each) for each in config.strategy.layout_candidates(world.size)],
            )
        else:
            here = RankContext(world, Partition.open(parts).shard(world.rank))
        strategy = build(graph, config, context=here).strategy
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent, world.traffic.rounds
        list(strategy.train_epoch(1))
        found.append((world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]))
    return found


def sar_tree(model: dict[str, Any], **more: Any) -> dict[str, Any]:
    return words(model, name="sar", **more) | {"workers": 3}


@pytest.mark.parametrize(("make", "cases"), [(plain_graph, SAR), (typed_graph, [({"name": "rgcn"}, {"group": 1})])])
def test_sar(crew: Crew, tmp_path: Path, make: Any, cases: list[Any]) -> None:
    store = save_store(make(), tmp_path / "store")
    parts = cut_graph(store, 3, "random", tmp_path / "parts")
    trees = [
        sar_tree(model, **{"prefetch": 1, "group": 1, "cache_for_backward": False, **more}) for model, more in cases
    ]
    ranks = crew.run(3, counted, str(tmp_path / "store"), trees, str(parts))
    for place, tree in enumerate(trees):
        (foreseen,) = estimates_of(tmp_path / "store", tree, parts)
        assert foreseen.bytes == sum(rank[place][0] for rank in ranks), tree
        assert {rank[place][1] for rank in ranks} == {foreseen.rounds}, tree


def test_pipe(crew: Crew, tmp_path: Path) -> None:
    store = save_store(plain_graph(), tmp_path / "store")
    for model, workers, ways, chunks in PIPE:
        tree = words(model, name="pipe", graph_parallel=ways, chunks=chunks, exactness_check_every=0) | {
            "workers": workers
        }
        parts = cut_graph(store, workers, "range", tmp_path / f"parts-{workers}")
        (foreseen,) = estimates_of(tmp_path / "store", tree, parts)
        ranks = crew.run(workers, counted, str(tmp_path / "store"), [tree], None)
        assert foreseen.bytes == sum(rank[0][0] for rank in ranks), model
        if ways == workers:  # how layers are dealt to several stages goes by the clock
            assert foreseen.rounds == max(rank[0][1] for rank in ranks), model
        assert foreseen.kind == ("exact" if ways == chunks else "approximate")


def count_event_traffic(world: World, store: str, tree: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(steps, bytes, rounds) of this rank in the second epoch of every parallel layout."""
    config, graph = resolve(tree), open_store(store)
    context = RankContext(with_shelf(world))
    counts = []
    for layout in all_layouts(world.size):
        settings = config.strategy.model_copy(update=vars(layout))
        strategy = build_strategy(settings, make_event_job(graph, config, context))
        list(strategy.train_epoch(0))
        before = world.traffic.bytes_sent, world.traffic.rounds
        steps = len(list(strategy.train_epoch(1)))
        counts.append((steps, world.traffic.bytes_sent - before[0], world.traffic.rounds - before[1]))
    return counts


def test_event_traffic_is_as_estimated_but_for_the_start_of_a_sweep(crew: Crew, tmp_path: Path) -> None:
    graph = make_dataset("events", users=40, items=20, events=900, features=2, seed=3)
    save_store(graph, tmp_path / "store")
    strategy = {"name": "temporal", "batch": 20, "static": False, "eval_negatives": 3}
    tree = {"strategy": strategy, "model": {"hidden": 8, "neighbours": 3}, "workers": 2}
    config = resolve(tree)

    def run_trials(workers: int, candidates: Sequence[tuple[StrategyConfig, int]]) -> list[TrialTiming]:
        return [TrialTiming(1.0, 1e8) for _ in candidates]

    job = make_event_job(open_store(tmp_path / "store"), config, RankContext())
    alone, *estimates = estimate_costs(config.strategy, EventPlanningContext(job, 2, run_trials))
    assert alone.workers == 1 and alone.bytes == alone.rounds == 0
    ranks = crew.run(2, count_event_traffic, str(tmp_path / "store"), tree)
    for place, (layout, estimate) in enumerate(zip(all_layouts(2), estimates, strict=True)):
        assert {axis: estimate.settings[axis] for axis in vars(layout)} == vars(layout)
        steps = ranks[0][place][0]
        sent, rounds = sum(rank[place][1] for rank in ranks), max(rank[place][2] for rank in ranks)
        assert abs(estimate.steps - steps) <= 1
        assert steps / estimate.steps * estimate.bytes == pytest.approx(sent, rel=0.01), layout
        assert steps / estimate.steps * estimate.rounds == pytest.approx(rounds, abs=2), layout


def layer_loads(world: World, parts: str, wanted: list[int], layers: int) -> list[LayerLoad]:
    """What a rank finds out by talking to the others."""
    shard = Partition.open(parts).shard(world.rank)
    ring = RingExchange(world)
    reach = torch.zeros(60, dtype=torch.bool)
    reach[wanted] = True
    flow = ActiveRows.compute(shard, ring, {"node": reach[shard.nodes("node").store_ids]}, layers)
    view = RingView.open(shard, ring, flow)
    found = []
    for index in range(layers):
        part = (view if flow is None else view.for_layer(flow, index)).blocks
        routes = {("node", way): part.exchange_plan("node", way) for way in ("in", "out")}
        edges = sum(each.num_edges for each in part.edges.values())
        rows = part.nodes["node"].num_dst
        give = {way: tuple(map(len, each.send_rows)) for way, each in routes.items()}
        found.append(LayerLoad(rows, edges, give, {way: tuple(each.recv_counts) for way, each in routes.items()}))
    return found


@pytest.mark.parametrize("wanted", [[3], [1, 5, 40], list(range(50))])
def test_loads_are_those_that_ranks_agree_on(crew: Crew, tmp_path: Path, wanted: list[int]) -> None:
    parts = cut_graph(plain_graph(), 3, "random", tmp_path / "parts")
    shards = [Partition.open(parts).shard(part) for part in range(3)]
    reach = torch.zeros(60, dtype=torch.bool)
    reach[wanted] = True
    masks = [{"node": reach[shard.nodes("node").store_ids]} for shard in shards]
    found = crew.run(3, layer_loads, str(parts), wanted, 3)
    assert count_active_rows(shards, masks, 3).loads == [[rank[layer] for rank in found] for layer in range(3)]
