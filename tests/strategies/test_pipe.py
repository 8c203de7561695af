"""Runs of pipe: resumed bit for bit, on other grids and numbers of workers, with idle workers."""

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
from gnnfleet.graph.store import save_store
from gnnfleet.strategies.pipe import strategy as strategy_module
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor
from gnnfleet.strategies.pipe.grid_planner import GridEstimate
from gnnfleet.strategies.protocol import RANK_LOCAL
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from tests.graphs import communities, scores_of
from tests.ranks import RankPool
from tests.strategies.pipe_runs import copy_state, is_equal, local, losses_of, pipe, pipe_on_two_layouts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


def train_and_resume(world: World, store: str, partitions: int, gradient: str) -> list[Any]:
    """Four epochs at once, and with a resume after two."""
    settings = {"gradient": gradient, "refresh": 3, "exactness_check_every": 2}
    full, first, second = (pipe(store, world, partitions=partitions, strategy=settings) for _ in range(3))
    losses = losses_of(full, range(4))
    first._open_grid(full.grid_estimate)  # layers are split by measured times
    resumed_losses = losses_of(first, range(2))
    second.load_state_dict(copy_state(first))
    resumed_losses += losses_of(second, range(2, 4))
    states = [copy_state(run) for run in (full, second)]
    histories = [state[RANK_LOCAL] | state["guard"] for state in states]
    return [losses, resumed_losses, *(state["model"] for state in states), *histories]


@pytest.mark.parametrize(("partitions", "gradient"), [(1, "stale"), (1, "double"), (2, "stale")])
def test_a_run_resumes_bit_for_bit(pool: RankPool, store: Path, partitions: int, gradient: str) -> None:
    for losses, resumed_losses, model, resumed_model, history, resumed_history in pool.run(
        2, train_and_resume, str(store), partitions, gradient
    ):
        assert losses == resumed_losses
        assert is_equal(model, resumed_model)
        assert is_equal(history, resumed_history)


def resume_on_other_stages(world: World, store: str) -> tuple[list[str], bool, list[float], list[float]]:
    """Resume a run whose layers would be split differently now."""
    first, log = pipe(store, world), list[str]()
    first._open_grid(replace(first.grid_estimate, layers=(range(1), range(1, 6))))
    losses_of(first, range(1))
    second = pipe(store, world, log=log)
    second._open_grid(replace(second.grid_estimate, layers=(range(4), range(4, 6))))
    second.load_state_dict(copy_state(first))
    is_same = second.grid_estimate.layers == first.grid_estimate.layers
    return log, is_same, losses_of(first, range(1, 3)), losses_of(second, range(1, 3))


def test_a_run_resumes_with_the_stages_it_began_with(pool: RankPool, store: Path) -> None:
    for log, is_same, losses, resumed_losses in pool.run(2, resume_on_other_stages, str(store)):
        assert not log and is_same and losses == resumed_losses


def resume_on_another_grid(world: World, store: str) -> tuple[list[str], str]:
    first, log = pipe(store, world, chunks=4), list[str]()
    losses_of(first, range(1))
    second = pipe(store, world, chunks=2, log=log)
    second.load_state_dict(copy_state(first))
    losses_of(second, range(1, 2))
    return log, second.artifacts()["schedule.svg"]


def test_another_grid_rebuilds_the_history_and_draws_its_schedule(pool: RankPool, store: Path) -> None:
    for log, picture in pool.run(2, resume_on_another_grid, str(store)):
        assert len(log) == 1 and "history is rebuilt" in log[0]
        titles = [
            title.text or "" for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")
        ]
        assert len(titles) == 2 * 2 * 2 and sum("chunk 2, backward" in title for title in titles) == 2


@pytest.mark.parametrize("method", ["mincut", "random"])
def test_other_chunks_rebuild_the_history(store: Path, method: str) -> None:
    """As many chunks as before, but of other nodes."""
    first, log = pipe(store, World()), list[str]()
    losses_of(first, range(1))
    state = copy_state(first)
    assert state[RANK_LOCAL]["cut"].tolist() == [1, 1, 4, 6]
    run = pipe(store, World(), method=method, log=log)
    run.load_state_dict(state)
    assert run._pipeline_rank is not None
    is_same = method == "mincut"
    assert bool(run._pipeline_rank.history.rows) == run._has_history == is_same
    assert ["history is rebuilt" in text for text in log] == [True] * (not is_same)
    losses_of(run, range(1, 2))


def resume_on_two_workers(world: World, store: str, checkpoint: str) -> tuple[list[str], ExactnessMonitor, str, float]:
    """Resume a run of one worker, without the state that belongs to a rank."""
    log: list[str] = []
    run = pipe_on_two_layouts(store, world, log)
    run._open_grid(next(estimate for estimate in run._estimates if not estimate.candidate.is_exact))
    log.clear()  # the choice of the grid
    run.load_state_dict(load_checkpoint(Path(checkpoint))[0])
    grid, monitor = str(run.grid), run._monitor
    (loss,) = losses_of(run, range(3, 4))
    run.close()
    return log, monitor, grid, loss


@pytest.mark.parametrize("level", ["fresh", "exact"])
def test_the_fallback_of_a_checkpoint_holds_for_other_numbers_of_workers(
    pool: RankPool, store: Path, tmp_path: Path, level: str
) -> None:
    settings = {"warmup_history": False, "refresh": 1000, "tolerance": 1.0, "exactness_check_every": 1}
    run = pipe(store, World(), chunks=8, method="random", strategy=settings)
    losses_of(run, range(2 if level == "fresh" else 3))
    assert run._monitor.level == level
    state = copy_state(run)
    save_checkpoint(tmp_path / "last", state, TrainState(), seed=3)
    for log, monitor, grid, loss in pool.run(2, resume_on_two_workers, str(store), str(tmp_path / "last")):
        assert (monitor.level, monitor.first, monitor.least) == (level, run._monitor.first, run._monitor.least)
        assert (monitor.next_epoch, monitor.check_interval) == (5, 5) and len(log) == 1 and "is rebuilt" in log[0]
        if level == "fresh":
            assert grid == "pipeline 2 stages, 8 chunks"
            continue
        assert grid in ("one worker", "graph parallel, 2 workers")
        reference = local(store)
        reference.load_state_dict({part: state[part] for part in ("model", "optimizer")})
        assert [loss] == pytest.approx(losses_of(reference, range(3, 4)), rel=1e-5)


def train_on_a_single_worker(world: World, store: str) -> tuple[float, dict[str, float], int, list[int], bool]:
    """Run two workers on a grid of one."""

    def choose(estimates: list[GridEstimate]) -> tuple[GridEstimate, list[str]]:
        return next(estimate for estimate in estimates if estimate.candidate.workers == 1), []

    before, strategy_module.choose_grid = strategy_module.choose_grid, choose  # type: ignore[assignment]
    try:
        threads = [torch.get_num_threads()]
        run = pipe_on_two_layouts(store, world, model={"name": "sage", "hidden": 8})
        threads.append(torch.get_num_threads())
        rank, layouts = run._pipeline_rank, run._job.context.layouts
        assert layouts is not None
        has_chunk_order = rank is None or torch.equal(rank.layout.order, layouts[0].order)
        loss = losses_of(run, range(2))[-1]
        metrics, rows = run.evaluate("val"), len(run.predict().logits)
        run.close()
        return loss, metrics, rows, [*threads, torch.get_num_threads()], has_chunk_order
    finally:
        strategy_module.choose_grid = before


def test_workers_beyond_the_grid_wait(pool: RankPool, store: Path) -> None:
    first, second = pool.run(2, train_on_a_single_worker, str(store))
    (loss, metrics, rows, threads, has_chunk_order), (idle_loss, idle_metrics, idle_rows, idle_threads, _) = (
        first,
        second,
    )
    reference = local(store, model={"name": "sage", "hidden": 8})
    assert loss == idle_loss == pytest.approx(losses_of(reference, range(2))[-1], rel=1e-5)
    assert metrics == idle_metrics
    assert scores_of(metrics) == pytest.approx(scores_of(reference.evaluate("val")), rel=1e-4)
    assert (rows, idle_rows) == (200, 0)
    # The worker has the threads of both while the other one waits, if there are as many cores.
    assert threads == [1, min(2, len(os.sched_getaffinity(0))), 1] and idle_threads == [1, 1, 1] and has_chunk_order


def test_infeasible_grids_are_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        resolve({"strategy": {"name": "pipe", "graph_parallel": 3}, "workers": 4})
    with pytest.raises(ConfigError, match="multiple"):
        resolve({"strategy": {"name": "pipe", "graph_parallel": 2, "chunks": 5}, "workers": 4})
    with pytest.raises(ConfigError, match="batch norm"):
        pipe(store, World(), model={"name": "gcn2", "layers": 6, "norm": "batch"})
