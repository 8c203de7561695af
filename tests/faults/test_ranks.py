"""Whatever happens to one rank, the others end within 15 s, name it, and the run goes on to the same weights.

Seeded trials, many at a time: they mostly wait. Ranks train with sar, each with a part, or with pipe, each with a
stage; no launcher watches over them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.comm.shm_transport import MIN_BYTES
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from tests.faults.trials import PATIENCE, Forks, Trial, spec_of
from tests.graphs import assert_same_checkpoint, communities

SIZE = 3
DRAW = random.Random("faults")
WORDS: dict[str, Any] = {
    "strategy": "sar",
    "workers": SIZE,
    "model": {"hidden": 128, "layers": 2, "dropout": 0.0},
    "partition": "random",  # most rows travel: messages are large enough for shared memory
    "train": {"epochs": 40, "checkpoint_seconds": 0.2},
}
PIPE: dict[str, Any] = {
    **WORDS,
    "strategy": {"name": "pipe", "graph_parallel": 1, "chunks": 6, "refresh": 3, "gradient": "control_variate"},
    "model": {"hidden": 32, "layers": 3},
    "train": {**WORDS["train"], "epochs": 15},
}
BOTH = (WORDS, PIPE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Messages are of about half of its rows a part."""
    nodes = 900
    assert nodes // SIZE // 2 * 128 * 4 > MIN_BYTES
    return save_store(communities(nodes), tmp_path_factory.mktemp("data") / "shop")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def hurt(trial: Trial, victim: int, number: signal.Signals, after: float, forks: Forks) -> float:
    forks.ready(trial)
    time.sleep(after)
    return trial.hit(victim, number)


def side_by_side(trials: list[Trial], plan: list[tuple[int, signal.Signals, float]], forks: Forks) -> list[float]:
    """Do to every trial what is planned for it; when it was done."""
    hits = [0.0] * len(trials)

    def one(place: int) -> None:
        victim, number, after = plan[place]
        hits[place] = hurt(trials[place], victim, number, after, forks)

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(trials))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return hits


def plan_of(count: int, number: signal.Signals) -> list[tuple[int, signal.Signals, float]]:
    return [(DRAW.randrange(SIZE), number, DRAW.uniform(0, 2.5)) for _ in range(count)]


def start(forks: Forks, store: Graph, folder: Path, count: int) -> list[Trial]:
    made = []
    for number in range(count):
        spec = spec_of(store, folder / f"run-{number}", BOTH[number % 2], epochs=10_000)
        made.append(forks.start(spec.as_json(), folder / f"trial-{number}", size=SIZE))
    return made


def check_ends(trial: Trial, victim: int, hit: float) -> None:
    """All others have ended in time, each with one error that names the victim."""
    for rank, (code, when) in trial.wait(25).items():
        if rank == victim:
            assert code == -signal.SIGKILL  # a paused one is ended for good by whoever finds it
            continue
        said = trial.said(rank)
        assert when - hit < 15, (rank, when - hit, said)
        assert code == 8 and f"rank {victim} (pid {trial.ranks[victim]}" in said, (code, said)
        assert "Traceback" not in said and said.count("error:") == 1


def test_others_end_and_name_the_one_that_is_gone(forks: Forks, store: Graph, tmp_path: Path) -> None:
    plan = [*plan_of(4, signal.SIGKILL), *plan_of(4, signal.SIGSTOP)]
    trials = start(forks, store, tmp_path, len(plan))
    hits = side_by_side(trials, plan, forks)
    for trial, (victim, _, _), hit in zip(trials, plan, hits, strict=True):
        check_ends(trial, victim, hit)


def test_an_exception_anywhere_reaches_all_with_its_traceback_once(forks: Forks, store: Graph, tmp_path: Path) -> None:
    count = 4
    trials, plan = start(forks, store, tmp_path, count), plan_of(count, signal.SIGUSR1)
    hits = side_by_side(trials, plan, forks)
    for trial, (victim, _, _), hit in zip(trials, plan, hits, strict=True):
        ended = trial.wait(25)
        said = [trial.said(rank) for rank in range(SIZE)]
        assert all(code == 1 and when - hit < 15 for code, when in ended.values()), (ended, said)
        assert all(f"unexpected Sabotage on rank {victim}: somewhere" in text for text in said), said
        assert [text.count("Traceback (most") > 0 for text in said] == [rank == victim for rank in range(SIZE)]


def test_what_is_slow_or_pauses_shortly_lives_and_without_the_store_all_end(
    forks: Forks, store: Graph, tmp_path: Path
) -> None:
    """A tenth of the time on, nine tenths off, for longer than silence may last; one pause of six seconds; no store."""
    slow, paused, lost = start(forks, store, tmp_path, 3)
    for trial in (slow, paused, lost):
        forks.ready(trial)
    paused.hit(2, signal.SIGSTOP)
    os.kill(lost.store, signal.SIGKILL)
    begun = time.monotonic()
    while time.monotonic() - begun < 13:
        slow.hit(1, signal.SIGSTOP)
        time.sleep(0.45)
        slow.hit(1, signal.SIGCONT)
        time.sleep(0.05)
        if time.monotonic() - begun > 6:
            paused.hit(2, signal.SIGCONT)
    for trial in (slow, paused):
        assert not any(pid in trial.ended for pid in trial.ranks), [trial.said(rank) for rank in range(SIZE)]
        for rank in range(SIZE):
            trial.hit(rank, signal.SIGTERM)
        assert {code for code, _ in trial.wait(10).values()} == {128 + signal.SIGTERM}
    for rank, (code, when) in lost.wait(10).items():
        assert code == 8 and when - begun < 15 and "has not reached the store" in lost.said(rank)


def test_killed_runs_go_on_to_the_uninterrupted_weights(forks: Forks, store: Graph, tmp_path: Path) -> None:
    wholes = [spec_of(store, tmp_path / f"whole-{number}", words) for number, words in enumerate(BOTH)]
    specs = [spec_of(store, tmp_path / f"cut-{number}", words) for number, words in enumerate(BOTH)]
    uninterrupted = [
        forks.start(spec.as_json(), tmp_path / f"trial-whole-{number}", size=SIZE) for number, spec in enumerate(wholes)
    ]
    trials = [forks.start(spec.as_json(), tmp_path / f"trial-{number}", size=SIZE) for number, spec in enumerate(specs)]
    plan = plan_of(len(trials), signal.SIGKILL)
    hits = side_by_side(trials, plan, forks)
    for trial, (victim, _, _), hit in zip(trials, plan, hits, strict=True):
        check_ends(trial, victim, hit)
    again = [forks.start(spec.as_json(), tmp_path / f"again-{number}", size=SIZE) for number, spec in enumerate(specs)]
    for trial in (*uninterrupted, *again):
        assert all(code == 0 for code, _ in trial.wait(PATIENCE).values()), [trial.said(rank) for rank in range(SIZE)]
    for number in range(len(specs)):
        for name in ("last", "best"):
            cut, kept = (Path(run) / "checkpoints" / name for run in (specs[number].run_dir, wholes[number].run_dir))
            assert_same_checkpoint(cut, kept)
