"""pipe apart from its arithmetic: the order of work, stages, plans, the guard, histories that go on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError, PartitionError
from gnnfleet.graph.partition.chunk_layout import (
    ChunkLayout,
    build_chunk_layout,
    open_chunk_layouts,
    write_chunk_layouts,
)
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.nn.base import Model
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition
from gnnfleet.strategies.pipe import contention_profile, layer_bench, layer_profile, profile
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.contention_profile import fit_contention
from gnnfleet.strategies.pipe.cpu_affinity import CpuShare, limit_threads
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor, GradientComparison
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    GridEstimate,
    LayerCost,
    ModelCost,
    ParameterUse,
    choose_grid,
    estimate_grid,
)
from gnnfleet.strategies.pipe.layer_profile import fit_layer_costs
from gnnfleet.strategies.pipe.pipeline_rank import should_cache_inputs
from gnnfleet.strategies.pipe.profile import ProfileResult, chunk_loads
from gnnfleet.strategies.pipe.schedule import ChunkSpan, bubble_share, chunk_order, split_layers
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.strategies.protocol import RANK_LOCAL, State, Strategy
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.build import RankContext, build, validate
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from tests.equivalence.spread import typed_graph
from tests.graphs import communities
from tests.ranks import Crew

LAYER = LayerCost(1e-4, 1e-4, 1e-5, 256, 256, 256, 0)
NONE = ParameterUse((frozenset(),) * 32, {})


def equal(chunks: int, rows: int = 1000, edges: int = 20_000) -> list[tuple[int, int]]:
    """(rows, edges) of chunks that are alike, of a graph of about so many."""
    return [(rows // chunks, edges // chunks)] * chunks


def spans_of(world: World, store: str, ways: int) -> list[ChunkSpan]:
    """What all ranks did in the second epoch."""
    run = pipe(store, world, ways=ways, chunks=4 * ways)
    for epoch in range(2):
        list(run.train_epoch(epoch))
    assert isinstance(run, PipeStrategy)
    return run._every_span()


@pytest.mark.parametrize(("size", "ways"), [(2, 1), (4, 2)])
def test_every_chunk_passes_every_stage_once_each_way(crew: Crew, store: Path, size: int, ways: int) -> None:
    stages, (spans, *others) = size // ways, crew.run(size, spans_of, str(store), ways)
    assert all(other == spans for other in others) and len(spans) == size * 4 * 2
    began = {(span.stage, span.way, span.turn, span.back): span.begin for span in spans}
    for stage, way in product(range(stages), range(ways)):
        there = list(enumerate(chunk_order(3, 1, way, 4, shuffle=True)))  # the same in all stages of a way
        own = [(span.turn, span.chunk, span.back) for span in spans if (span.stage, span.way) == (stage, way)]
        assert own == [(*each, False) for each in there] + [(*each, True) for each in there[::-1]]
        for turn in range(4 if stage else 0):  # what a stage works on comes from the one before, and goes back to it
            assert began[stage - 1, way, turn, False] < began[stage, way, turn, False]
            assert began[stage, way, turn, True] < began[stage - 1, way, turn, True]


def test_orders_are_permutations_of_their_own() -> None:
    orders = [chunk_order(1, epoch, way, 8, shuffle=True) for epoch in range(3) for way in range(2)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert chunk_order(1, 2, 1, 8, shuffle=True) == orders[5]
    assert chunk_order(1, 2, 1, 8, shuffle=False) == list(range(8))


@settings(max_examples=40)
@given(costs=st.lists(st.floats(0.01, 10), min_size=1, max_size=7), stages=st.integers(1, 7))
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int) -> None:
    found = split_layers(costs, stages)
    stages = min(stages, len(costs))
    assert [index for each in found for index in each] == list(range(len(costs))) and len(found) == stages
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[index] for index in each) for each in found) == pytest.approx(best)


def test_the_bubble_of_equal_slots() -> None:
    spans = [
        ChunkSpan(stage, 0, turn, turn, back, 0.0, 0.0, 1.0)
        for stage in range(4)
        for turn in range(8)
        for back in (False, True)
    ]
    assert bubble_share(spans, 4) == pytest.approx(3 / 11)
    assert bubble_share(spans[:16], 1) == pytest.approx(0.0)


# -- plans --


def test_the_plan_is_never_slower_than_one_worker() -> None:
    for bandwidth in (1e5, 1e7, 1e9):
        machine = ClusterProfile(bandwidth, 1e-3, 2.0, 8)
        grids = [
            GridCandidate(1, 1, 1),
            GridCandidate(1, 8, 32),
            GridCandidate(2, 4, 32, (900, 900)),
            GridCandidate(8, 1, 8, (5000, 5000)),
        ]
        weights = ParameterUse((frozenset({"weight"}),) * 32, {"weight": 10**6})
        work = ModelCost((LAYER,) * 32)
        every = [estimate_grid(work, grid, machine, loads=equal(grid.chunks), weights=weights) for grid in grids]
        best, lines = choose_grid(every)
        assert best.seconds <= every[0].seconds and len(lines) == 4 and str(best.candidate) in lines[0]


def test_the_cheaper_side_of_the_decision_rule() -> None:
    """The pipeline sends less exactly when layers × copies outweigh what passes between stages."""
    machine, work = ClusterProfile(1e6, 0.0, 1.0, 4), ModelCost((LAYER,) * 8)
    for copies in (10, 100, 1000, 3000):
        pipeline = estimate_grid(work, GridCandidate(1, 4, 16), machine, loads=equal(16, 1600), weights=NONE)
        graph = estimate_grid(
            work, GridCandidate(4, 1, 4, (copies, copies)), machine, loads=equal(4, 1600), weights=NONE
        )
        assert pipeline.bytes == 2 * 3 * 1600 * 256 and graph.bytes == 2 * 8 * copies * 256
        assert (pipeline.bytes < graph.bytes) == (8 * copies > 3 * 1600)


def test_waiting_for_each_other_speaks_against_ways_and_sharing_processors_for_bubbles() -> None:
    ways, stages = GridCandidate(4, 1, 4), GridCandidate(1, 4, 16)

    def seconds(grid: GridCandidate, machine: ClusterProfile) -> float:
        return estimate_grid(
            ModelCost((LAYER,) * 8), grid, machine, loads=equal(grid.chunks, 1600), weights=NONE
        ).seconds

    calm = ClusterProfile(1e12, 0.0, 1.0, 4)
    assert seconds(ways, ClusterProfile(1e12, 0.0, 1.0, 4, sync_latency=0.5)) == pytest.approx(
        seconds(ways, calm) + 2 * 8 * 0.5
    )
    assert seconds(stages, ClusterProfile(1e12, 0.0, 1.0, 4, sync_latency=0.5)) == pytest.approx(seconds(stages, calm))
    slot = 2 * LAYER.seconds(100, 1250)
    assert seconds(stages, calm) == pytest.approx(19 * slot)
    # Two processors: all four at work take twice as long as one, three half as long again, two have one each.
    assert seconds(stages, ClusterProfile(1e12, 0.0, 2.0, 4)) == pytest.approx((13 * 2 + 2 * (1 + 1 + 1.5)) * slot)


def test_seconds_of_given_numbers() -> None:
    """A chunk as such, rows, edges; tables once in a pass, the optimizer once; bytes at the rate that was measured."""
    layers = LayerCost(1.0, 0.1, 0.01, 8, 0, 4, 0), LayerCost(2.0, 0.2, 0.0, 8, 4, 4, 0)
    work, far = ModelCost(layers, per_pass=0.75, optimizer_seconds=6.0), ClusterProfile(1e18, 0.0, 1.0, 2)

    def seconds(grid: GridCandidate, machine: ClusterProfile, loads: list[tuple[int, int]]) -> float:
        return estimate_grid(work, grid, machine, loads=loads, weights=NONE).seconds

    assert seconds(GridCandidate(1, 1, 1), far, [(20, 400)]) == pytest.approx(7 + 6 + 20 * 0.75 + 6)
    # Two slots and one to fill, as long as the dearer stage (2 + 10 · 0.2); each stage has half of the weights.
    assert seconds(GridCandidate(1, 2, 2), far, [(10, 200)] * 2) == pytest.approx(3 * 4 + 20 * 0.75 + 3)
    # Chunks that differ: the larger fills the pipeline.
    assert seconds(GridCandidate(1, 2, 2), far, [(5, 200), (15, 200)]) == pytest.approx(
        3 * 4 * _mean(3.5 + 2.0 + 1.0, 4.5 + 2.0 + 3.0, 4.5 + 2.0 + 3.0) / _mean(6.5, 9.5) + 20 * 0.75 + 3
    )
    # Ways wait for the larger of them.
    assert seconds(GridCandidate(2, 1, 2), far, [(5, 200), (15, 200)]) == pytest.approx(9.5 + 10 * 0.75 + 6)
    # Rows of other ways travel at the rate with all sending: crowding is in it.
    slow, crowded = ClusterProfile(40.0, 0.0, 1.0, 2), ClusterProfile(40.0, 0.0, 2.0, 2)
    grid, loads = GridCandidate(2, 1, 2, (20, 20)), [(10, 200)] * 2
    apart = (20 * 4 + 20 * 8) / 2 / 40.0
    assert seconds(grid, slow, loads) == pytest.approx(8 + 20 * 0.75 + 6 + apart)
    assert seconds(grid, crowded, loads) == pytest.approx(2 * (8 + 20 * 0.75 + 6) + apart)


def _mean(*numbers: float) -> float:
    return sum(numbers) / len(numbers)


def test_two_workers_on_two_processors_do_not_slow_each_other() -> None:
    machine = ClusterProfile(1e12, 0.0, 4.0, 8)
    assert [machine.slowdown(active) for active in (1, 2, 3, 8)] == [1.0, 1.0, 1.5, 4.0]
    assert (
        ClusterProfile(1e12, 0.0, 2.5, 2).slowdown(1) == 1.0
    )  # a single one is slowed by none, however little there is


# -- what plans are made from --


def test_layers_by_rows_and_edges() -> None:
    """A layer of 3 + 0.1 for a row + 0.01 for an edge; without edges it has less to do anyway."""
    much, little = 3 + 0.1 * 50 + 0.01 * 700, 3 + 0.1 * 1 + 0.01 * 20
    ((least, row, edge),) = fit_layer_costs((50, 1), (700, 20), ([2 + 0.1 * 50], [2 + 0.1]), ([much], [little]))
    assert (least, row, edge) == pytest.approx((3, 0.1, 0.01))
    # With batch norm there is no piece of one row: nothing is known of what any chunk takes.
    ((least, row, edge),) = fit_layer_costs((50, 0), (700, 0), ([5.0], [0.0]), ([12.0], [0.0]))
    assert (least, row, edge) == pytest.approx((0, 0.1, 0.01))
    # Clocks that say nonsense make nothing negative.
    assert min(fit_layer_costs((50, 1), (700, 20), ([1.0], [2.0]), ([0.5], [3.0]))[0]) >= 0


def test_crowding_is_no_less_than_threads_that_share_processors() -> None:
    """Ranks that did not compute at the same time would say that they do not disturb each other."""
    assert (
        CpuShare(2, 1, 4).oversubscription == 2.0
        and CpuShare(2, 1, 2).oversubscription == 1.0
        and CpuShare(8, 2, 4).oversubscription == 1.0
    )
    calm = [[1.1, 2.0, 1.0, 1.0, 0.001]] * 4
    assert fit_contention(calm, meetings=10) == pytest.approx((2.0, 0.001))
    # Most ranks count, the slowest of those that walk freely is waited for anyway, and a word is the least.
    every = [[2.6, 2.0, 1.0, 1.5, 0.001], [2.4, 2.0, 1.2, 1.5, 0.002], [9.0, 2.0, 1.1, 1.5, 0.003]]
    assert fit_contention(every, meetings=10) == pytest.approx((2.6, 0.03))


def test_a_worker_that_is_left_alone_has_the_threads_of_those_that_wait() -> None:
    assert [CpuShare(2, 1, 4).free, CpuShare(8, 2, 8).free, CpuShare(8, 1, 4).free, CpuShare(2, 4, 4).free] == [
        2,
        8,
        4,
        4,
    ]


def test_what_is_made_once_is_not_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes by the numbers in tables that are made: a layer on a chunk, or on a row, makes none. What a
    pass makes is told apart, and grows with the way."""
    made, original = [0], torch.Tensor.new_zeros

    def new_zeros(self: torch.Tensor, *size: Any, **words: Any) -> torch.Tensor:
        table = original(self, *size, **words)
        made[0] += table.numel()
        return table

    def clock() -> float:
        return float(made[0])

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    monkeypatch.setattr(layer_bench, "time", SimpleNamespace(perf_counter=clock, thread_time=clock))
    model, tried_on = trial_of(240)
    with limit_threads(1):
        for chunk in (tried_on.partition.chunks[1], tried_on.partition.new_chunk(3, 4, -2)):
            tried = layer_bench.LayerHarness(model, tried_on, chunk)
            assert (
                layer_profile.layer_seconds(tried) == [0.0] * 4
                and layer_profile.per_pass_seconds(tried, [0.0] * 4) == 4 * 8.0
            )
        found = profile.profile_layers(World(), model, tried_on, CpuShare(2, 1, 1), single=True)
    assert all(layer.seconds(240, 4000) == 0.0 for work in (found.work, found.single) for layer in work.layers)
    assert found.work.per_pass == 4 * 8.0 and found.single.per_pass == 0.0  # a single worker keeps none
    assert ProfileResult.from_json(json.loads(json.dumps(found.as_json()))) == found


def trial_of(nodes: int, chunks: int = 6) -> tuple[Model, layer_bench.BenchSetup]:
    """Four layers on a way."""
    graph = communities(nodes)
    model = validate(graph, resolve({"model": {"name": "gcn2", "hidden": 8, "layers": 4}})).model
    way = ChunkedPartition(graph, build_chunk_layout(graph, 1, chunks), 0)
    (table,) = graph.nodes.values()
    assert table.x is not None
    features = table.x[way.layout.order]
    return model, layer_bench.BenchSetup(way, lambda rows: features[rows], "float32", True, WireCodec(), TrainConfig())


def test_a_single_worker_is_tried_as_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tables, with the threads of those that wait; what the others lose by crowding is no matter."""

    def seconds(tried: layer_bench.LayerHarness) -> list[float]:
        """As if each layer took 1, and 0.1 for a row, half of it for tables, 0.01 for an edge."""
        chunk = tried.chunk
        took = 1 + (0.1 if tried.uses_history else 0.05) * chunk.rows + 0.01 * layer_bench.num_in_edges(chunk)
        return [took / torch.get_num_threads()] * 4

    monkeypatch.setattr(layer_profile, "layer_seconds", seconds)
    model, tried_on = trial_of(120)
    with limit_threads(1):
        found = profile.profile_layers(World(), model, tried_on, CpuShare(2, 1, 4), single=True)
        assert torch.get_num_threads() == 1
    assert [layer.seconds(0, 0) for layer in found.work.layers] == pytest.approx([1] * 4)
    assert [layer.seconds(100, 1000) for layer in found.work.layers] == pytest.approx([21] * 4)
    assert [layer.seconds(100, 1000) for layer in found.single.layers] == pytest.approx([(1 + 5 + 10) / 2] * 4)
    assert found.cost_of(GridCandidate(1, 1, 1)) is found.single and found.cost_of(GridCandidate(1, 2, 8)) is found.work


def waits_and_runs(world: World, store: str, ways: int) -> list[str]:
    """What a rank does while all of them try layers: w(ait), r(un)."""
    seen: list[str] = []
    wait, run, every = contention_profile.barrier, layer_bench.LayerBench.run, contention_profile.profile_together

    def waiting(aside: World) -> None:
        seen.append("w")
        wait(aside)

    def running(self: layer_bench.LayerBench, *args: Any) -> None:
        seen.append("r")
        run(self, *args)

    def all_at_once(*args: Any) -> ClusterProfile:
        seen.clear()
        return every(*args)

    contention_profile.barrier, layer_bench.LayerBench.run, profile.profile_together = waiting, running, all_at_once  # type: ignore[assignment,attr-defined,method-assign]
    try:
        pipe(store, world, ways=ways).close()
    finally:
        contention_profile.barrier, layer_bench.LayerBench.run, profile.profile_together = wait, run, every  # type: ignore[attr-defined,method-assign]
    return seen


@pytest.mark.parametrize("ways", [1, 2])
def test_all_begin_together_each_time(crew: Crew, store: Path, ways: int) -> None:
    """Six layers: three for each of two stages and twice, or all of them once, first without a clock."""
    walks = 3 if ways == 1 else 6  # ways are tried once more, waiting for each other
    for seen in crew.run(2, waits_and_runs, str(store), ways):
        assert "".join(seen) == "r" * (3 if ways == 1 else 6) + ("w" + "r" * 6) * walks


def test_every_chunk_is_counted() -> None:
    graph = communities(120)
    (edges,) = graph.edges.values()
    layout = build_chunk_layout(graph, 2, 6)
    way = [ChunkedPartition(graph, layout, each) for each in range(2)]
    chunks = [chunk for each in way for chunk in each.chunks]
    assert chunk_loads(graph, layout) == [(chunk.rows, layer_bench.num_in_edges(chunk)) for chunk in chunks]
    assert sum(count for _, count in chunk_loads(graph, layout)) == edges.count


def test_aggregates_of_many_relations_are_kept_where_asked() -> None:
    cases: list[tuple[int, Any, bool]] = [(8, "auto", True), (9, "auto", False), (9, True, True), (1, False, False)]
    for relations, wanted, kept in cases:
        job: Any = SimpleNamespace(graph=SimpleNamespace(edges=range(relations)), task=SimpleNamespace(hides=False))
        assert should_cache_inputs(PipeConfig(cache_inputs=wanted), job) is kept


def test_sums_of_gradients_are_counted() -> None:
    weights = ParameterUse(
        (frozenset({"a", "both"}), frozenset({"b", "both"})), {"a": 10, "b": 20, "both": 100, "head": 1000}
    )
    two = [range(1), range(1, 2)]
    assert weights.owners(two) == {"a": [0], "b": [1], "both": [0, 1], "head": [1]}
    assert weights.allreduce_bytes(GridCandidate(1, 2, 8), two) == 2 * 100
    assert weights.allreduce_bytes(GridCandidate(3, 2, 6), two) == 3 * (10 + 20 + 200 + 1000) + 6 * 100
    assert weights.allreduce_bytes(GridCandidate(3, 1, 3), [range(2)]) == 3 * 1130


# -- the guard --


def test_comparisons_get_rarer_and_steps_down_are_said() -> None:
    guard, seen = ExactnessMonitor.begin(5, 0.5, 0), []
    for epoch in range(200):
        if guard.is_due(epoch):
            seen.append(epoch)
            guard, text = guard.update(epoch, GradientComparison(0.9, 1.0, 1.0))
            assert not text
    assert seen == [5, 15, 35, 75, 155]
    guard, text = guard.update(200, GradientComparison(0.2, 1.0, 1.5))
    assert guard.level == "fresh" and "0.20" in text and guard.next_epoch == 205
    assert guard.update(205, GradientComparison(0.8, 1.0, 1.0))[0].next_epoch == 210
    guard, text = guard.update(205, GradientComparison(0.1, 1.0, 1.5))
    assert guard.level == "exact" and "exact" in text and not guard.is_due(10_000)
    assert ExactnessMonitor.begin(5, 0.5, 0).resumed(guard.state()) == guard
    assert not ExactnessMonitor.begin(0, 0.5, 0).is_due(100)


def test_a_loss_that_rises_again_is_a_step_down() -> None:
    """Gradients may point the right way and steps overshoot all the same."""
    guard = ExactnessMonitor.begin(5, 0.5, 0)
    for epoch, loss in ((5, 2.0), (15, 1.0), (35, 1.05)):
        guard, text = guard.update(epoch, GradientComparison(0.9, loss, loss))
        assert not text and guard.level == "planned"
    down, text = guard.update(75, GradientComparison(0.9, 1.2, 1.2))
    assert down.level == "fresh" and "risen to 1.2, it had been 1" in text
    assert ExactnessMonitor.begin(5, 0.5, 0).resumed(down.state()) == down
    assert (
        not down.update(80, GradientComparison(0.9, 1.2, 1.2))[1]
        and down.update(80, GradientComparison(0.9, 1.9, 1.9))[1]
    )
    assert guard.update(75, GradientComparison(float("nan"), float("nan"), float("nan")))[0].level == "fresh"
    assert guard.update(75, GradientComparison(0.9, 1.0, float("nan")))[0].level == "fresh"


def test_a_loss_that_only_rises_is_two_steps_down() -> None:
    guard, texts = ExactnessMonitor.begin(5, 0.5, 0), []
    for epoch, loss in ((5, 2.0), (15, 2.6), (20, 5.0)):
        guard, text = guard.update(epoch, GradientComparison(0.9, loss, loss))
        texts.append(text)
    assert not texts[0] and "risen to 2.6, it had been 2" in texts[1] and "risen to 5, it had been 2.6" in texts[2]
    assert guard.level == "exact"


def test_a_rise_after_a_step_down_is_seen_wherever_it_began() -> None:
    """The step down was for a cosine, at a loss above that of the first comparison."""
    guard = (
        ExactnessMonitor.begin(5, 0.5, 0)
        .update(5, GradientComparison(0.9, 2.0, 2.0))[0]
        .update(15, GradientComparison(0.2, 3.0, 3.0))[0]
    )
    assert guard.level == "fresh" and guard.least > guard.first
    assert not guard.update(20, GradientComparison(0.9, 3.1, 3.1))[1]
    assert "risen to 3.3, it had been 3" in guard.update(20, GradientComparison(0.9, 3.3, 3.3))[1]


def test_noise_is_no_rise() -> None:
    """A twentieth of the loss, however little it had fallen."""
    guard = ExactnessMonitor.begin(5, 0.5, 0)
    for epoch, loss in ((5, 1.950), (15, 1.940), (35, 1.945), (75, 2.030), (155, 1.941)):
        guard, text = guard.update(epoch, GradientComparison(0.9, loss, loss))
        assert not text and guard.level == "planned"
    assert guard.update(235, GradientComparison(0.9, 2.04, 2.04))[1]


# -- layouts --


def test_layouts_are_kept_and_checked(tmp_path: Path) -> None:
    graph = communities(120)
    made = [build_chunk_layout(graph, 1, 4), build_chunk_layout(graph, 2, 6)]
    for layout in made:
        assert sorted(layout.order.tolist()) == list(range(120))
        assert torch.equal(layout.order[layout.position], torch.arange(120))
    write_chunk_layouts(graph, made, tmp_path / "cut")
    for found, layout in zip(open_chunk_layouts(tmp_path / "cut"), made, strict=True):
        assert torch.equal(found.order, layout.order) and torch.equal(found.starts, layout.starts)
        assert (found.partitions, found.halo_rows, found.chunks_per_partition) == (
            layout.partitions,
            layout.halo_rows,
            layout.chunks_per_partition,
        )
        assert torch.equal(found.digest, layout.digest)
    assert not torch.equal(made[0].digest, build_chunk_layout(graph, 1, 4, method="random").digest)
    with pytest.raises(PartitionError, match="evenly"):
        build_chunk_layout(graph, 2, 5)
    with pytest.raises(PartitionError, match="one node type"):
        build_chunk_layout(typed_graph(), 1, 2)
    (tmp_path / "cut" / "order_0.npy").unlink()
    with pytest.raises(PartitionError):
        open_chunk_layouts(tmp_path / "cut")


def test_chunks_have_equal_shares_of_edges() -> None:
    graph = communities(2000)
    (edges,) = graph.edges.values()
    degree = edges.indptr.diff()
    layout = build_chunk_layout(graph, 2, 8)
    loads = torch.tensor([float(degree[layout.order[slice(*layout.chunk_range(c))]].sum()) for c in range(8)])
    assert float(loads.max() / loads.mean()) < 1.15


# -- runs --


def pipe(store: str, world: World, *, chunks: int = 4, ways: int = 1, method: str = "mincut", **words: Any) -> Strategy:
    graph = open_store(store)
    knobs = {"name": "pipe", "graph_parallel": ways, "chunks": chunks, **words.pop("strategy", {})}
    tree = {
        "strategy": knobs,
        "model": {"name": "gcn2", "hidden": 8, "layers": 6, **words.pop("model", {})},
        "workers": world.size,
        "train": {"lr": 0.01},
        "seed": 3,
    }
    here = RankContext(
        world,
        layouts=[build_chunk_layout(graph, ways, chunks, method=method)],
        log_user=words.pop("say", lambda text: None),
    )
    return build(graph, resolve(tree | words), here=here).strategy


def copied(run: Strategy) -> State:
    return {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in run.state_dict().items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


@pytest.mark.parametrize(("memory", "lines"), [(None, 0), ("512MiB", 1)])
def test_a_limit_that_is_not_kept_is_said(store: Path, memory: str | None, lines: int) -> None:
    said: list[str] = []
    pipe(str(store), World(), say=said.append, memory=memory).close()
    assert [text.partition(":")[0] for text in said] == ["pipe does not keep within --memory 512 MiB"] * lines


def goes_on(world: World, store: str, ways: int, gradient: str) -> list[Any]:
    """Four epochs, and two and two with everything but the state thrown away in between."""
    knobs = {"gradient": gradient, "refresh": 3, "exactness_check_every": 2}
    whole = pipe(store, world, ways=ways, strategy=knobs)
    losses = [record.loss for epoch in range(4) for record in whole.train_epoch(epoch)]
    first = pipe(store, world, ways=ways, strategy=knobs)
    assert isinstance(whole, PipeStrategy) and isinstance(first, PipeStrategy)
    first._open_grid(whole.grid_estimate)  # stages go by measured times, histories by stages
    again = [record.loss for epoch in range(2) for record in first.train_epoch(epoch)]
    state = copied(first)
    second = pipe(store, world, ways=ways, strategy=knobs)
    second.load_state_dict(state)
    again += [record.loss for epoch in range(2, 4) for record in second.train_epoch(epoch)]
    ends = [copied(one) for one in (whole, second)]
    beside = [end[RANK_LOCAL] | end["guard"] for end in ends]
    return [losses, again, *(end["model"] for end in ends), *beside]


@pytest.mark.parametrize(("ways", "gradient"), [(1, "stale"), (1, "double"), (2, "control_variate")])
def test_a_run_goes_on_in_the_same_bits(crew: Crew, store: Path, ways: int, gradient: str) -> None:
    for losses, again, one, two, own, other in crew.run(2, goes_on, str(store), ways, gradient):
        assert losses == again
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        assert own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)


def other_stages(world: World, store: str) -> tuple[list[str], bool, list[float], list[float]]:
    """A run that was cut elsewhere than would be measured now, killed and gone on with."""
    first = pipe(store, world)
    assert isinstance(first, PipeStrategy)
    first._open_grid(replace(first.grid_estimate, layers=(range(1), range(1, 6))))
    list(first.train_epoch(0))
    state = copied(first)
    said: list[str] = []
    second = pipe(store, world, say=said.append)
    assert isinstance(second, PipeStrategy)
    second._open_grid(replace(second.grid_estimate, layers=(range(4), range(4, 6))))
    second.load_state_dict(state)
    same = second.grid_estimate.layers == first.grid_estimate.layers
    return (
        said,
        same,
        *([record.loss for epoch in (1, 2) for record in one.train_epoch(epoch)] for one in (first, second)),
    )


def test_a_run_goes_on_in_the_stages_it_began_with(crew: Crew, store: Path) -> None:
    for said, same, one, two in crew.run(2, other_stages, str(store)):
        assert not said and same and one == two


def other_grid(world: World, store: str) -> tuple[list[str], str]:
    first = pipe(store, world, chunks=4)
    list(first.train_epoch(0))
    state = copied(first)
    said: list[str] = []
    second = pipe(store, world, chunks=2, say=said.append)
    second.load_state_dict(state)
    list(second.train_epoch(1))
    return said, second.artifacts()["schedule.svg"]


def test_another_grid_makes_its_history_anew_and_draws_it(crew: Crew, store: Path) -> None:
    for said, picture in crew.run(2, other_grid, str(store)):
        assert len(said) == 1 and "made anew" in said[0]
        titles = [
            title.text or "" for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")
        ]
        assert len(titles) == 2 * 2 * 2 and sum("chunk 2, backward" in title for title in titles) == 2


def test_other_chunks_make_their_history_anew(store: Path) -> None:
    """As many as before, of other nodes: rows of the tables mean other nodes."""
    first = pipe(str(store), World())
    list(first.train_epoch(0))
    state = copied(first)
    assert state[RANK_LOCAL]["cut"].tolist() == [1, 1, 4, 6]
    for method in ("mincut", "random"):
        said: list[str] = []
        run = pipe(str(store), World(), method=method, say=said.append)
        run.load_state_dict(state)
        assert isinstance(run, PipeStrategy) and run._pipeline_rank is not None
        same = method == "mincut"
        assert bool(run._pipeline_rank.history.history) == run._is_warm == same and len(said) == (0 if same else 1)
        assert same or "made anew" in said[0]
        list(run.train_epoch(1))


def more_workers(world: World, store: str, checkpoint: str) -> tuple[list[str], ExactnessMonitor, str, float]:
    """A run of one worker, gone on with by those of a pipeline: without what belongs to a rank."""
    graph, said = open_store(store), list[str]()
    tree = {"strategy": {"name": "pipe"}, "model": {"name": "gcn2", "hidden": 8, "layers": 6}, "workers": 2, "seed": 3}
    here = RankContext(
        world, layouts=[build_chunk_layout(graph, 1, 8), build_chunk_layout(graph, 2, 2)], log_user=said.append
    )
    run = build(graph, resolve(tree | {"train": {"lr": 0.01}}), here=here).strategy
    assert isinstance(run, PipeStrategy)
    run._open_grid(next(each for each in run._forecasts if not each.candidate.is_exact))
    said.clear()  # plans
    run.load_state_dict(load_checkpoint(Path(checkpoint))[0])
    grid, guard = str(run.grid), run._monitor
    (record,) = run.train_epoch(3)
    run.close()
    return said, guard, grid, record.loss


@pytest.mark.parametrize("level", ["fresh", "exact"])
def test_what_the_guard_found_holds_for_other_numbers_of_workers(
    crew: Crew, store: Path, tmp_path: Path, level: str
) -> None:
    knobs = {"warmup_history": False, "refresh": 1000, "tolerance": 1.0, "exactness_check_every": 1}
    run = pipe(str(store), World(), chunks=8, method="random", strategy=knobs)
    for epoch in range(2 if level == "fresh" else 3):
        list(run.train_epoch(epoch))
    assert isinstance(run, PipeStrategy) and run._monitor.level == level
    state = copied(run)
    save_checkpoint(tmp_path / "last", state, TrainState(), seed=3)
    for said, guard, grid, loss in crew.run(2, more_workers, str(store), str(tmp_path / "last")):
        assert (guard.level, guard.first, guard.least) == (level, run._monitor.first, run._monitor.least)
        assert (guard.next_epoch, guard.check_interval) == (5, 5) and len(said) == 1 and "made anew" in said[0]
        if level == "fresh":
            assert grid == "pipeline 2 stages, 8 chunks"
            continue
        assert grid in ("one worker", "graph parallel, 2 ways")
        words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "train": {"lr": 0.01}, "seed": 3}
        local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
        local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
        (wanted,) = local.train_epoch(3)
        assert loss == pytest.approx(wanted.loss, rel=1e-5)


Gradients = dict[str, Tensor]


def both_gradients(run: Strategy, epoch: int) -> tuple[Gradients, Gradients]:
    """(with history, exact) of what this rank has layers of; nothing is learnt, and history stays as it was."""
    assert isinstance(run, PipeStrategy)
    found = []
    for exact in (False, True):
        run._pass(epoch, exact=exact, adopts=False)
        named = run.model.named_parameters()
        found.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
    return found[0], found[1]


def compares(world: World, store: str, ways: int) -> tuple[float, Gradients, Gradients, float]:
    """The cosine that the guard finds with the first weights, the gradients it is of, and what it finds between two
    exact passes."""
    run = pipe(store, world, ways=ways, chunks=4 * ways, strategy={"warmup_history": False, "exactness_check_every": 1})
    gradients = both_gradients(run, 0)
    assert isinstance(run, PipeStrategy)
    run._monitor = replace(run._monitor, next_epoch=0)
    list(run.train_epoch(0))
    cosine = run.epoch_metrics()["cosine"]
    whole = pipe(store, world, ways=ways, chunks=ways)
    assert isinstance(whole, PipeStrategy)
    whole._compare(0, whole._pass(0, exact=False, adopts=False))
    return cosine, *gradients, whole.epoch_metrics()["cosine"]


@pytest.mark.parametrize(("size", "ways"), [(1, 1), (2, 1), (4, 2)])
def test_the_cosine_is_that_of_all_gradients_together(crew: Crew, store: Path, size: int, ways: int) -> None:
    found = crew.run(size, compares, str(store), ways)
    history, exact = ({name: g for one in found for name, g in one[place].items()} for place in (1, 2))
    wanted = both_gradients(pipe(str(store), World(), chunks=1), 0)[1]  # of one process and one chunk
    assert history.keys() == exact.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(exact[name], gradient, rtol=1e-3, atol=1e-6)
    one, two = (torch.cat([each[name].flatten().double() for name in wanted]) for each in (history, exact))
    cosine = float(torch.nn.functional.cosine_similarity(one, two, dim=0))
    assert cosine < 0.999
    for known, *_, between_exact in found:
        assert known == pytest.approx(cosine, abs=1e-6) and between_exact == pytest.approx(1.0, abs=1e-6)


def test_the_guard_ends_in_exact_training(store: Path) -> None:
    """Gradients of random chunks without a history, of which none is good enough."""
    knobs = {
        "gradient": "double",
        "warmup_history": False,
        "refresh": 1000,
        "tolerance": 1.0,
        "exactness_check_every": 1,
    }
    said: list[str] = []
    run = pipe(str(store), World(), chunks=8, method="random", strategy=knobs, say=said.append)
    for epoch in range(3):
        list(run.train_epoch(epoch))
    assert len(said) == 2 and "comes from exact passes" in said[0] and "every epoch is exact" in said[1]
    words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "train": {"lr": 0.01}, "seed": 3}
    local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
    state = run.state_dict()
    local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    for epoch in range(3, 6):
        (found,), (wanted,) = run.train_epoch(epoch), local.train_epoch(epoch)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert len(said) == 2


def falls_back(world: World, store: str) -> tuple[list[str], list[str], State, float]:
    """A pipeline among grids that were planned with, whose gradients are never good enough."""
    graph = open_store(store)
    said: list[str] = []
    knobs = {"name": "pipe", "tolerance": 1.0, "exactness_check_every": 1, "warmup_history": False}
    tree = {"strategy": knobs, "model": {"name": "gcn2", "hidden": 8, "layers": 6}, "workers": 2, "seed": 3}
    here = RankContext(
        world, layouts=[build_chunk_layout(graph, 1, 8), build_chunk_layout(graph, 2, 2)], log_user=said.append
    )
    run = build(graph, resolve(tree), here=here).strategy
    assert isinstance(run, PipeStrategy)
    run._open_grid(next(each for each in run._forecasts if not each.candidate.is_exact))
    grids = []
    for epoch in range(3):
        list(run.train_epoch(epoch))
        grids.append(str(run.grid))
    state = copied(run)
    (record,) = run.train_epoch(3)
    run.close()
    return said, grids, state, record.loss


def test_the_guard_falls_back_to_a_grid_that_is_exact(crew: Crew, store: Path) -> None:
    (said, grids, state, loss), (_, others, _, other) = crew.run(2, falls_back, str(store))
    assert grids == others and loss == other
    assert grids[:2] == ["pipeline 2 stages, 8 chunks"] * 2 and grids[2] in ("one worker", "graph parallel, 2 ways")
    assert f"every epoch is exact, {grids[2]}" in said[-1]
    words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "seed": 3}
    local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
    local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    (wanted,) = local.train_epoch(3)
    assert loss == pytest.approx(wanted.loss, rel=1e-5)


def spare(world: World, store: str) -> tuple[float, dict[str, float], int, list[int], bool]:
    """A plan that leaves a worker without work."""
    from gnnfleet.strategies.pipe import strategy as module

    def first(every: list[GridEstimate]) -> tuple[GridEstimate, list[str]]:
        return next(each for each in every if each.candidate.workers == 1), []

    before, module.choose_grid = module.choose_grid, first  # type: ignore[assignment]
    try:
        graph = open_store(store)
        tree = {"strategy": {"name": "pipe"}, "model": {"name": "sage", "hidden": 8}, "workers": 2, "seed": 1}
        here = RankContext(world, layouts=[build_chunk_layout(graph, 1, 8), build_chunk_layout(graph, 2, 2)])
        threads = [torch.get_num_threads()]
        run = build(graph, resolve(tree), here=here).strategy
        threads.append(torch.get_num_threads())
        loss = [record.loss for epoch in range(2) for record in run.train_epoch(epoch)][-1]
        assert isinstance(run, PipeStrategy) and here.layouts is not None
        near = run._pipeline_rank is None or torch.equal(run._pipeline_rank.layout.order, here.layouts[0].order)
        found = run.evaluate("val"), len(run.predict().logits)
        run.close()
        return loss, *found, [*threads, torch.get_num_threads()], near
    finally:
        module.choose_grid = before


def test_workers_beyond_the_plan_wait(crew: Crew, store: Path) -> None:
    (loss, val, rows, threads, near), (other, val_too, none, others, _) = crew.run(2, spare, str(store))
    local = build(open_store(store), resolve({"model": {"name": "sage", "hidden": 8}, "seed": 1})).strategy
    wanted = [record.loss for epoch in range(2) for record in local.train_epoch(epoch)][-1]
    assert loss == other == pytest.approx(wanted, rel=1e-5)
    assert val == val_too == pytest.approx(local.evaluate("val"), rel=1e-4) and (rows, none) == (200, 0)
    # Who is left has the threads of both, as far as there are processors, and rows in the order of the chunks.
    assert threads == [1, min(2, len(os.sched_getaffinity(0))), 1] and others == [1, 1, 1] and near


def test_what_does_not_fit_is_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        resolve({"strategy": {"name": "pipe", "graph_parallel": 3}, "workers": 4})
    with pytest.raises(ConfigError, match="multiple"):
        resolve({"strategy": {"name": "pipe", "graph_parallel": 2, "chunks": 5}, "workers": 4})
    with pytest.raises(ConfigError, match="batch norm"):
        pipe(str(store), World(), model={"norm": "batch"})
    assert isinstance(ChunkLayout(torch.arange(3), torch.tensor([0, 3]), 1).chunks_per_partition, int)
