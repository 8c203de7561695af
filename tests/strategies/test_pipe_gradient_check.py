"""The exactness check of pipe: when it compares gradients, and how it falls back to exact training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.strategies.pipe.gradient_check import ExactnessMonitor, GradientComparison
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.strategies.protocol import State, Strategy
from gnnfleet.training.build import RankContext, build
from tests.graphs import communities
from tests.ranks import Crew
from tests.strategies.pipe_runs import copied, pipe


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


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
    run = build(graph, resolve(tree), context=here).strategy
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
    assert grids[:2] == ["pipeline 2 stages, 8 chunks"] * 2 and grids[2] in ("one worker", "graph parallel, 2 workers")
    assert f"every epoch is exact, {grids[2]}" in said[-1]
    words = {"model": {"name": "gcn2", "hidden": 8, "layers": 6}, "seed": 3}
    local = build(open_store(store), resolve({**words, "strategy": {"name": "local", "order": "store"}})).strategy
    local.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    (wanted,) = local.train_epoch(3)
    assert loss == pytest.approx(wanted.loss, rel=1e-5)
