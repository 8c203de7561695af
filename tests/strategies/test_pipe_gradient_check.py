"""The exactness check of pipe: when it compares gradients, and how it falls back to exact training."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.store import save_store
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.strategies.protocol import State
from tests.graphs import communities
from tests.ranks import RankPool
from tests.strategies.pipe_runs import copy_state, local, losses_of, pipe, pipe_on_two_layouts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


def test_checks_get_rarer_and_failures_are_reported() -> None:
    monitor, epochs = ExactnessMonitor.begin(5, 0.5), []
    for epoch in range(200):
        if monitor.is_due(epoch):
            epochs.append(epoch)
            monitor, text = monitor.update(epoch, 0.9, 1.0, 1.0)
            assert not text
    assert epochs == [5, 15, 35, 75, 155]
    monitor, text = monitor.update(200, 0.2, 1.0, 1.5)
    assert monitor.level == "fresh" and "0.20" in text and monitor.next_epoch == 205
    assert monitor.update(205, 0.8, 1.0, 1.0)[0].next_epoch == 210
    monitor, text = monitor.update(205, 0.1, 1.0, 1.5)
    assert monitor.level == "exact" and "exact" in text and not monitor.is_due(10_000)
    assert ExactnessMonitor.begin(5, 0.5).resumed(monitor.state()) == monitor
    assert not ExactnessMonitor.begin(0, 0.5).is_due(100)


def test_a_rising_loss_is_a_failure() -> None:
    """Steps may overshoot although gradients have the right direction."""
    monitor = ExactnessMonitor.begin(5, 0.5)
    for epoch, loss in ((5, 2.0), (15, 1.0), (35, 1.05)):
        monitor, text = monitor.update(epoch, 0.9, loss, loss)
        assert not text and monitor.level == "planned"
    fallback, text = monitor.update(75, 0.9, 1.2, 1.2)
    assert fallback.level == "fresh" and "rose from 1 to 1.2" in text
    assert ExactnessMonitor.begin(5, 0.5).resumed(fallback.state()) == fallback
    assert not fallback.update(80, 0.9, 1.2, 1.2)[1] and fallback.update(80, 0.9, 1.9, 1.9)[1]
    assert monitor.update(75, nan, nan, nan)[0].level == "fresh"
    assert monitor.update(75, 0.9, 1.0, nan)[0].level == "fresh"


def test_a_loss_that_only_rises_fails_twice() -> None:
    monitor, texts = ExactnessMonitor.begin(5, 0.5), []
    for epoch, loss in ((5, 2.0), (15, 2.6), (20, 5.0)):
        monitor, text = monitor.update(epoch, 0.9, loss, loss)
        texts.append(text)
    assert not texts[0] and "rose from 2 to 2.6" in texts[1] and "rose from 2.6 to 5" in texts[2]
    assert monitor.level == "exact"


def test_a_rise_after_a_fallback_counts_from_the_loss_of_the_fallback() -> None:
    """The first failure is for a cosine, at a loss above that of the first check."""
    monitor = ExactnessMonitor.begin(5, 0.5).update(5, 0.9, 2.0, 2.0)[0].update(15, 0.2, 3.0, 3.0)[0]
    assert monitor.level == "fresh" and monitor.least > monitor.first
    assert not monitor.update(20, 0.9, 3.1, 3.1)[1]
    assert "rose from 3 to 3.3" in monitor.update(20, 0.9, 3.3, 3.3)[1]


def test_a_rise_below_a_twentieth_of_the_loss_is_noise() -> None:
    monitor = ExactnessMonitor.begin(5, 0.5)
    for epoch, loss in ((5, 1.950), (15, 1.940), (35, 1.945), (75, 2.030), (155, 1.941)):
        monitor, text = monitor.update(epoch, 0.9, loss, loss)
        assert not text and monitor.level == "planned"
    assert monitor.update(235, 0.9, 2.04, 2.04)[1]


Gradients = dict[str, Tensor]


def both_gradients(run: PipeStrategy, epoch: int) -> tuple[Gradients, Gradients]:
    """(gradients with history, exact ones) of this rank's layers; weights and history do not change."""
    gradients = []
    for exact in (False, True):
        run._run_pass(epoch, [], exact=exact, updates_history=False)
        named = run.model.named_parameters()
        gradients.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
    return gradients[0], gradients[1]


def compare_gradients(world: World, store: str, partitions: int) -> tuple[float, Gradients, Gradients, float]:
    """The cosine that is measured at the first weights, both gradients, and the cosine between two exact passes."""
    settings = {"warmup_history": False, "exactness_check_every": 1}
    run = pipe(store, world, partitions=partitions, chunks=4 * partitions, strategy=settings)
    gradients = both_gradients(run, 0)
    run._monitor = replace(run._monitor, next_epoch=0)
    losses_of(run, range(1))
    exact_run = pipe(store, world, partitions=partitions, chunks=partitions)
    exact_run._compare_gradients(0, exact_run._run_pass(0, [], exact=False, updates_history=False))
    return run.epoch_metrics()["cosine"], *gradients, exact_run.epoch_metrics()["cosine"]


@pytest.mark.parametrize(("size", "partitions"), [(1, 1), (2, 1), (4, 2)])
def test_the_cosine_is_that_of_the_gradients_of_all_stages(
    pool: RankPool, store: Path, size: int, partitions: int
) -> None:
    ranks = pool.run(size, compare_gradients, str(store), partitions)
    history, exact = ({name: grad for rank in ranks for name, grad in rank[index].items()} for index in (1, 2))
    expected = both_gradients(pipe(store, World(), chunks=1), 0)[1]  # of one process and one chunk
    assert history.keys() == exact.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(exact[name], gradient, rtol=1e-3, atol=1e-6)
    vectors = [torch.cat([grads[name].flatten().double() for name in expected]) for grads in (history, exact)]
    cosine = float(torch.nn.functional.cosine_similarity(*vectors, dim=0))
    assert cosine < 0.999
    for measured, *_, exact_cosine in ranks:
        assert measured == pytest.approx(cosine, abs=1e-6) and exact_cosine == pytest.approx(1.0, abs=1e-6)


def test_two_failures_end_in_exact_training(store: Path) -> None:
    """No cosine of random chunks without a history reaches 1."""
    settings = {"warmup_history": False, "refresh": 1000, "tolerance": 1.0, "exactness_check_every": 1}
    log: list[str] = []
    run = pipe(store, World(), chunks=8, method="random", strategy=settings, log=log)
    losses_of(run, range(3))
    assert len(log) == 2 and "exact pass every 1 epochs" in log[0] and "All further epochs are exact" in log[1]
    reference, state = local(store), run.state_dict()
    reference.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    assert losses_of(run, range(3, 6)) == pytest.approx(losses_of(reference, range(3, 6)), rel=1e-5)
    assert len(log) == 2


def fall_back(world: World, store: str) -> tuple[list[str], list[str], State, float]:
    """Start with a pipeline whose gradients never agree enough."""
    settings = {"name": "pipe", "tolerance": 1.0, "exactness_check_every": 1, "warmup_history": False}
    log, grids = list[str](), []
    run = pipe_on_two_layouts(store, world, log, strategy=settings)
    run._open_grid(next(estimate for estimate in run._estimates if not estimate.candidate.is_exact))
    for epoch in range(3):
        losses_of(run, range(epoch, epoch + 1))
        grids.append(str(run.grid))
    state = copy_state(run)
    (loss,) = losses_of(run, range(3, 4))
    run.close()
    return log, grids, state, loss


def test_two_failures_open_an_exact_grid(pool: RankPool, store: Path) -> None:
    (log, grids, state, loss), (_, second_grids, _, second_loss) = pool.run(2, fall_back, str(store))
    assert grids == second_grids and loss == second_loss
    assert grids[:2] == ["pipeline 2 stages, 8 chunks"] * 2 and grids[2] in ("one worker", "graph parallel, 2 workers")
    assert f"All further epochs are exact: {grids[2]}." in log[-1]
    reference = local(store)
    reference.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    assert [loss] == pytest.approx(losses_of(reference, range(3, 4)), rel=1e-5)
