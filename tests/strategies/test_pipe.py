"""pipe apart from its arithmetic: the schedule as a table, stages, plans, the guard, histories that go on."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError, PartitionError
from gnnfleet.graph.chunks import Layout, lay_out, open_layouts, write_layouts
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.run.build import Here, build
from gnnfleet.run.config import resolve
from gnnfleet.strategies.base import PRIVATE, State, Strategy
from gnnfleet.strategies.pipe.guard import Compared, Guard
from gnnfleet.strategies.pipe.plan import Candidate, Forecast, LayerCost, Machine, Weights, choose, forecast
from gnnfleet.strategies.pipe.schedule import Span, back_of, bubble, order_of, split_layers, work_of
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from tests.equivalence.spread import typed_graph
from tests.ranks import Crew
from tests.run.graphs import communities

LAYER = LayerCost(1e-4, 1.0, 256, 256, 256, 0)
NONE = Weights((frozenset(),) * 32, {})


@given(stages=st.integers(1, 6), chunks=st.integers(1, 9))
def test_every_chunk_passes_every_stage_once_each_way(stages: int, chunks: int) -> None:
    slots = range(chunks + stages - 1)
    for work, towards in ((work_of, 1), (back_of, -1)):
        table = [[work(stage, slot, stages, chunks) for slot in slots] for stage in range(stages)]
        for stage, row in enumerate(table):
            done = [turn for turn in row if turn is not None]
            assert done == (list(range(chunks)) if towards > 0 else list(range(chunks))[::-1])
            assert row.count(None) == stages - 1
            before = stage - towards
            if 0 <= before < stages:  # a slot after the stage it comes from
                assert all(row.index(turn) == table[before].index(turn) + 1 for turn in done)


def test_orders_are_permutations_of_their_own() -> None:
    orders = [order_of(1, epoch, way, 8, shuffle=True) for epoch in range(3) for way in range(2)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert order_of(1, 2, 1, 8, shuffle=True) == orders[5]
    assert order_of(1, 2, 1, 8, shuffle=False) == list(range(8))


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
        Span(stage, 0, turn, turn, back, 0.0, 0.0, 1.0)
        for stage in range(4)
        for turn in range(8)
        for back in (False, True)
    ]
    assert bubble(spans, 4) == pytest.approx(3 / 11)
    assert bubble(spans[:16], 1) == pytest.approx(0.0)


# -- plans --


def test_the_plan_is_never_slower_than_one_worker() -> None:
    for bandwidth in (1e5, 1e7, 1e9):
        machine = Machine(bandwidth, 1e-3, 2.0, 8)
        grids = [
            Candidate(1, 1, 1),
            Candidate(1, 8, 32),
            Candidate(2, 4, 32, (900, 900)),
            Candidate(8, 1, 8, (5000, 5000)),
        ]
        weights = Weights((frozenset({"weight"}),) * 32, {"weight": 10**6})
        every = [forecast([LAYER] * 32, grid, machine, rows=1000, weights=weights) for grid in grids]
        best, lines = choose(every)
        assert best.seconds <= every[0].seconds and len(lines) == 4 and str(best.candidate) in lines[0]


def test_the_cheaper_side_of_the_decision_rule() -> None:
    """The pipeline sends less exactly when layers × copies outweigh what passes between stages."""
    machine = Machine(1e6, 0.0, 1.0, 4)
    for copies in (10, 100, 1000, 3000):
        pipeline = forecast([LAYER] * 8, Candidate(1, 4, 16), machine, rows=1000, weights=NONE)
        graph = forecast([LAYER] * 8, Candidate(4, 1, 4, (copies, copies)), machine, rows=1000, weights=NONE)
        assert pipeline.bytes == 2 * 3 * 1000 * 256 and graph.bytes == 2 * 8 * copies * 256
        assert (pipeline.bytes < graph.bytes) == (8 * copies > 3 * 1000)


def test_waiting_for_each_other_speaks_against_ways_and_sharing_processors_for_bubbles() -> None:
    ways, stages = Candidate(4, 1, 4), Candidate(1, 4, 16)

    def seconds(grid: Candidate, machine: Machine) -> float:
        return forecast([LAYER] * 8, grid, machine, rows=1000, weights=NONE).seconds

    calm = Machine(1e12, 0.0, 1.0, 4)
    assert seconds(ways, Machine(1e12, 0.0, 1.0, 4, meeting=0.5)) == pytest.approx(seconds(ways, calm) + 2 * 8 * 0.5)
    assert seconds(stages, Machine(1e12, 0.0, 1.0, 4, meeting=0.5)) == pytest.approx(seconds(stages, calm))
    slot = 2 * LAYER.seconds(1 / 16)
    assert seconds(stages, calm) == pytest.approx(19 * slot)
    # All four at work take twice as long as one alone: six slots of filling and draining are shorter.
    assert seconds(stages, Machine(1e12, 0.0, 2.0, 4)) == pytest.approx((13 + 2 * (3 + 4 + 5) / 6) * slot)


def test_sums_of_gradients_are_counted() -> None:
    weights = Weights(
        (frozenset({"a", "both"}), frozenset({"b", "both"})), {"a": 10, "b": 20, "both": 100, "head": 1000}
    )
    two = [range(1), range(1, 2)]
    assert weights.owners(two) == {"a": [0], "b": [1], "both": [0, 1], "head": [1]}
    assert weights.summed(Candidate(1, 2, 8), two) == 2 * 100
    assert weights.summed(Candidate(3, 2, 6), two) == 3 * (10 + 20 + 200 + 1000) + 6 * 100
    assert weights.summed(Candidate(3, 1, 3), [range(2)]) == 3 * 1130


# -- the guard --


def test_comparisons_get_rarer_and_steps_down_are_said() -> None:
    guard, seen = Guard.begin(5, 0.5, 0), []
    for epoch in range(200):
        if guard.is_due(epoch):
            seen.append(epoch)
            guard, text = guard.after(epoch, Compared(0.9, 1.0, 1.0))
            assert not text
    assert seen == [5, 15, 35, 75, 155]
    guard, text = guard.after(200, Compared(0.2, 1.0, 1.5))
    assert guard.level == "fresh" and "0.20" in text and guard.due == 205
    assert guard.after(205, Compared(0.8, 1.0, 1.0))[0].due == 210
    guard, text = guard.after(205, Compared(0.1, 1.0, 1.5))
    assert guard.level == "exact" and "exact" in text and not guard.is_due(10_000)
    assert Guard.begin(5, 0.5, 0).resumed(guard.state()) == guard
    assert not Guard.begin(0, 0.5, 0).is_due(100)


def test_a_loss_that_rises_again_is_a_step_down() -> None:
    """Gradients may point the right way and steps overshoot all the same."""
    guard = Guard.begin(5, 0.5, 0)
    for epoch, loss in ((5, 2.0), (15, 1.0), (35, 1.05)):
        guard, text = guard.after(epoch, Compared(0.9, loss, loss))
        assert not text and guard.level == "planned"
    down, text = guard.after(75, Compared(0.9, 1.2, 1.2))
    assert down.level == "fresh" and "risen to 1.2, it had been 1" in text
    assert Guard.begin(5, 0.5, 0).resumed(down.state()) == down
    assert not down.after(80, Compared(0.9, 1.2, 1.2))[1] and down.after(80, Compared(0.9, 1.9, 1.9))[1]
    assert guard.after(75, Compared(float("nan"), float("nan"), float("nan")))[0].level == "fresh"


# -- layouts --


def test_layouts_are_kept_and_checked(tmp_path: Path) -> None:
    graph = communities(120)
    made = [lay_out(graph, 1, 4), lay_out(graph, 2, 6)]
    for layout in made:
        assert sorted(layout.order.tolist()) == list(range(120))
        assert torch.equal(layout.order[layout.place], torch.arange(120))
    write_layouts(graph, made, tmp_path / "cut")
    for found, layout in zip(open_layouts(tmp_path / "cut"), made, strict=True):
        assert torch.equal(found.order, layout.order) and torch.equal(found.starts, layout.starts)
        assert (found.ways, found.copies, found.slots) == (layout.ways, layout.copies, layout.slots)
    with pytest.raises(PartitionError, match="evenly"):
        lay_out(graph, 2, 5)
    with pytest.raises(PartitionError, match="one node type"):
        lay_out(typed_graph(), 1, 2)
    (tmp_path / "cut" / "order_0.npy").unlink()
    with pytest.raises(PartitionError):
        open_layouts(tmp_path / "cut")


def test_chunks_have_equal_shares_of_edges() -> None:
    graph = communities(2000)
    (edges,) = graph.edges.values()
    degree = edges.indptr.diff()
    layout = lay_out(graph, 2, 8)
    loads = torch.tensor([float(degree[layout.order[slice(*layout.chunk(c))]].sum()) for c in range(8)])
    assert float(loads.max() / loads.mean()) < 1.15


# -- runs --


def pipe(store: str, world: World, *, chunks: int = 4, ways: int = 1, method: str = "mincut", **words: Any) -> Strategy:
    graph = open_store(store)
    knobs = {"name": "pipe", "ways": ways, "chunks": chunks, **words.pop("strategy", {})}
    tree = {
        "strategy": knobs,
        "model": {"name": "gcn2", "hidden": 8, "layers": 6, **words.pop("model", {})},
        "workers": world.size,
        "train": {"lr": 0.01},
        "seed": 3,
    }
    here = Here(world, layouts=[lay_out(graph, ways, chunks, method=method)], say=words.pop("say", lambda text: None))
    return build(graph, resolve(tree), here=here).strategy


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


def goes_on(world: World, store: str, ways: int, gradient: str) -> list[Any]:
    """Four epochs, and two and two with everything but the state thrown away in between."""
    knobs = {"gradient": gradient, "refresh": 3, "guard": 2}
    whole = pipe(store, world, ways=ways, strategy=knobs)
    losses = [record.loss for epoch in range(4) for record in whole.steps(epoch)]
    first = pipe(store, world, ways=ways, strategy=knobs)
    assert isinstance(whole, PipeStrategy) and isinstance(first, PipeStrategy)
    first._work_on(whole.forecast)  # stages go by measured times, histories by stages
    again = [record.loss for epoch in range(2) for record in first.steps(epoch)]
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in first.state_dict().items()}
    second = pipe(store, world, ways=ways, strategy=knobs)
    second.load_state_dict(state)
    again += [record.loss for epoch in range(2, 4) for record in second.steps(epoch)]
    ends = [{key: t.clone() for key, t in one.state_dict()["model"].items()} for one in (whole, second)]
    private = [{key: t.clone() for key, t in one.state_dict()[PRIVATE].items()} for one in (whole, second)]
    return [losses, again, *ends, *private]


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
    first._work_on(replace(first.forecast, layers=(range(1), range(1, 6))))
    list(first.steps(0))
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in first.state_dict().items()}
    said: list[str] = []
    second = pipe(store, world, say=said.append)
    assert isinstance(second, PipeStrategy)
    second._work_on(replace(second.forecast, layers=(range(4), range(4, 6))))
    second.load_state_dict(state)
    same = second.forecast.layers == first.forecast.layers
    return said, same, *([record.loss for epoch in (1, 2) for record in one.steps(epoch)] for one in (first, second))


def test_a_run_goes_on_in_the_stages_it_began_with(crew: Crew, store: Path) -> None:
    for said, same, one, two in crew.run(2, other_stages, str(store)):
        assert not said and same and one == two


def other_grid(world: World, store: str) -> tuple[list[str], str]:
    first = pipe(store, world, chunks=4)
    list(first.steps(0))
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in first.state_dict().items()}
    said: list[str] = []
    second = pipe(store, world, chunks=2, say=said.append)
    second.load_state_dict(state)
    list(second.steps(1))
    return said, second.pages()["schedule.svg"]


def test_another_grid_makes_its_history_anew_and_draws_it(crew: Crew, store: Path) -> None:
    for said, picture in crew.run(2, other_grid, str(store)):
        assert len(said) == 1 and "made anew" in said[0]
        titles = [
            title.text or "" for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")
        ]
        assert len(titles) == 2 * 2 * 2 and sum("chunk 2, backward" in title for title in titles) == 2


def test_the_guard_ends_in_exact_training(store: Path) -> None:
    """Gradients of random chunks without a history, of which none is good enough."""
    knobs = {"gradient": "double", "warm": False, "refresh": 1000, "tolerance": 1.0, "guard": 1}
    said: list[str] = []
    run = pipe(str(store), World(), chunks=8, method="random", strategy=knobs, say=said.append)
    for epoch in range(3):
        list(run.steps(epoch))
    assert len(said) == 2 and "comes from exact passes" in said[0] and "every epoch is exact" in said[1]
    words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "train": {"lr": 0.01}, "seed": 3}
    local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
    state = run.state_dict()
    local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    for epoch in range(3, 6):
        (found,), (wanted,) = run.steps(epoch), local.steps(epoch)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert len(said) == 2


def falls_back(world: World, store: str) -> tuple[list[str], list[str], State, float]:
    """A pipeline among grids that were planned with, whose gradients are never good enough."""
    graph = open_store(store)
    said: list[str] = []
    knobs = {"name": "pipe", "tolerance": 1.0, "guard": 1, "warm": False}
    tree = {"strategy": knobs, "model": {"name": "gcn2", "hidden": 8, "layers": 6}, "workers": 2, "seed": 3}
    here = Here(world, layouts=[lay_out(graph, 1, 8), lay_out(graph, 2, 2)], say=said.append)
    run = build(graph, resolve(tree), here=here).strategy
    assert isinstance(run, PipeStrategy)
    run._work_on(next(each for each in run._forecasts if not each.candidate.is_exact))
    grids = []
    for epoch in range(3):
        list(run.steps(epoch))
        grids.append(str(run.grid))
    state = {part: {name: t.clone() for name, t in tensors.items()} for part, tensors in run.state_dict().items()}
    (record,) = run.steps(3)
    return said, grids, state, record.loss


def test_the_guard_falls_back_to_a_grid_that_is_exact(crew: Crew, store: Path) -> None:
    (said, grids, state, loss), (_, others, _, other) = crew.run(2, falls_back, str(store))
    assert grids == others and loss == other
    assert grids[:2] == ["pipeline 2 stages, 8 chunks"] * 2 and grids[2] in ("one worker", "graph parallel, 2 ways")
    assert f"every epoch is exact, {grids[2]}" in said[-1]
    words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "seed": 3}
    local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
    local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    (wanted,) = local.steps(3)
    assert loss == pytest.approx(wanted.loss, rel=1e-5)


def spare(world: World, store: str) -> tuple[float, dict[str, float], int]:
    """A plan that leaves a worker without work."""
    from gnnfleet.strategies.pipe import strategy as module

    def first(every: list[Forecast]) -> tuple[Forecast, list[str]]:
        return next(each for each in every if each.candidate.workers == 1), []

    before, module.choose = module.choose, first  # type: ignore[assignment]
    try:
        graph = open_store(store)
        tree = {"strategy": {"name": "pipe"}, "model": {"name": "sage", "hidden": 8}, "workers": 2, "seed": 1}
        here = Here(world, layouts=[lay_out(graph, 1, 8), lay_out(graph, 2, 2)])
        run = build(graph, resolve(tree), here=here).strategy
        loss = [record.loss for epoch in range(2) for record in run.steps(epoch)][-1]
        return loss, run.evaluate("val"), len(run.predict().logits)
    finally:
        module.choose = before


def test_workers_beyond_the_plan_wait(crew: Crew, store: Path) -> None:
    (loss, val, rows), (other, val_too, none) = crew.run(2, spare, str(store))
    local = build(open_store(store), resolve({"model": {"name": "sage", "hidden": 8}, "seed": 1})).strategy
    wanted = [record.loss for epoch in range(2) for record in local.steps(epoch)][-1]
    assert loss == other == pytest.approx(wanted, rel=1e-5)
    assert val == val_too == pytest.approx(local.evaluate("val"), rel=1e-4) and (rows, none) == (200, 0)


def test_what_does_not_fit_is_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        resolve({"strategy": {"name": "pipe", "ways": 3}, "workers": 4})
    with pytest.raises(ConfigError, match="multiple"):
        resolve({"strategy": {"name": "pipe", "ways": 2, "chunks": 5}, "workers": 4})
    with pytest.raises(ConfigError, match="batch norm"):
        pipe(str(store), World(), model={"norm": "batch"})
    assert isinstance(Layout(torch.arange(3), torch.tensor([0, 3]), 1).slots, int)
