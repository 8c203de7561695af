"""Runs of pipe: resumed in the same bits, on other grids and numbers of workers, with workers to spare."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.partition.chunk_layout import ChunkLayout, build_chunk_layout
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor
from gnnfleet.strategies.pipe.grid_planner import GridEstimate
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.strategies.protocol import RANK_LOCAL
from gnnfleet.training.build import RankContext, build
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from tests.graphs import communities
from tests.ranks import Crew
from tests.strategies.pipe_runs import copied, pipe


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
    run = build(graph, resolve(tree | {"train": {"lr": 0.01}}), context=here).strategy
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
        assert grid in ("one worker", "graph parallel, 2 workers")
        words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "train": {"lr": 0.01}, "seed": 3}
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
        run = build(graph, resolve(tree), context=here).strategy
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
