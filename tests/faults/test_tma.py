"""tma when trainers, links or the coordinator fail: the run goes on with whoever is there, and says who is not."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnfleet.config.resolve import resolve
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.report.metrics import read_metrics
from tests.equivalence.test_tma import rounds, trainers_in_threads
from tests.faults.driving import MODEL, QUICK, Fleet, Machine, within
from tests.faults.test_two_hosts import hosts
from tests.faults.trials import PATIENCE, until

__all__ = ["hosts"]


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph on which half of the nodes teach as much as all."""
    path = tmp_path_factory.mktemp("easy") / "shop"
    save_store(make_dataset("communities", nodes=4000, mean_degree=12, features=16, signal=2.0, seed=1), path)
    return path


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.process.kill()
        fleet.process.communicate()


def test_two_of_four_die_and_one_pauses(fleets: list[Fleet], easy: Path, tmp_path: Path) -> None:
    fleet = Fleet(easy, tmp_path / "run", 4, "--seed", "1", train__epochs=36)
    fleets.append(fleet)
    fleet.runs(1, trainers=4)
    fleet.member("3").kill()
    fleet.member("2").kill()
    fleet.runs(2, trainers=2)
    paused = fleet.member("1")
    paused.suspend()
    fleet.runs(2, trainers=1)
    before = len(fleet.rows)
    paused.resume()
    until(lambda: fleet.rows[-1]["trainers"] == 2, PATIENCE, "return")
    back = next(place for place, row in enumerate(fleet.rows[before:]) if row["trainers"] == 2)
    assert back <= 2, "the round under way, and the next"
    code, said = fleet.ends()
    assert code == 0, said
    for i in (2, 3):
        assert f"trainer {i} (pid " in said and "was killed by SIGKILL" in said and "continues without it" in said, said
    assert "finished without trainer 1 (no heartbeat for " in said, said
    config = resolve(
        {
            "strategy": {"name": "tma", "interval": 0.2, "fanouts": [5, 5], "batch": 64},
            "model": {"name": "sage", "hidden": 8, "layers": 2},
            "train": {"epochs": 36},
            "workers": 4,
            "seed": 1,
        }
    )
    with trainers_in_threads(easy, config) as strategy:  # where nothing happens
        rounds(strategy, 0, 20)
        whole = strategy.evaluate("val")["accuracy"]
    assert max(row["val"] for row in fleet.rows if "val" in row) > whole - 0.02


def test_trainers_and_the_coordinator_are_started_again(fleets: list[Fleet], store: Path, tmp_path: Path) -> None:
    """Two fleets side by side: in one both are killed, in the other the coordinator hangs."""
    more = ("--max-restarts", "1", "--set", "train.checkpoint_seconds=0")
    killed = Fleet(store, tmp_path / "killed", 2, *more, train__epochs=52)
    hangs = Fleet(store, tmp_path / "hangs", 2, *more, train__epochs=20, strategy__give_up=16)
    fleets += [killed, hangs]
    hangs.runs(2, trainers=2)
    hangs.member("coordinator").suspend()
    killed.runs(1, trainers=2)
    killed.member("1").kill()
    killed.runs(1, trainers=1)
    killed.runs(1, trainers=2)
    killed.member("coordinator").kill()
    code, said = killed.ends()
    assert code == 0, said
    assert "trainer 1 (pid " in said and "It is restarted." in said, said
    assert "coordinator (pid " in said and "resumes from the newest checkpoint" in said, said
    assert [row["epoch"] for row in killed.rows] == list(range(1, 53)) and killed.rows[-1]["trainers"] == 2
    code, said = hangs.ends()
    assert code == 0, said
    assert "was killed: no heartbeat for " in said and "resumes from the newest checkpoint" in said, said
    assert [row["epoch"] for row in hangs.rows] == list(range(1, 21))


def test_a_trainer_that_is_cut_off_comes_back(hosts: tuple[Machine, Machine], store: Path, tmp_path: Path) -> None:
    """The coordinator and a trainer on one machine, a trainer on another; the cable between them is out for a while."""
    one, two = hosts
    run_dir = tmp_path / "run"
    words = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    words += [
        "--set",
        f"strategy.listen={one.address}:29411",
        "--set",
        "strategy.local_trainers=1",
        "--set",
        "train.epochs=50",
    ]
    line = ["train", str(store), "-s", "tma", "-w", "2", "--run-dir", str(run_dir), *MODEL, *words]
    said = tmp_path / "said"
    first = within(one.host, line, said)
    second: subprocess.Popen[str] | None = None
    try:
        until(lambda: "Waiting for trainers" in said.read_text() or first.poll() is not None, PATIENCE, "the server")
        second = within(two.host, ["join", f"{one.address}:29411", str(store), "--trainers", "1"], tmp_path / "second")
        rows = lambda: read_metrics(run_dir / "metrics.jsonl")  # noqa: E731
        until(lambda: any(row["trainers"] == 2 for row in rows()), PATIENCE, "both trainers")
        two.host.cut()
        until(lambda: rows()[-1]["trainers"] == 1, PATIENCE, "rounds without it")
        seen = len(rows())
        until(lambda: len(rows()) >= seen + 2, PATIENCE, "more of them")
        seen = len(rows())
        two.host.mend()
        until(lambda: any(row["trainers"] == 2 for row in rows()[seen:]), PATIENCE, "return")
        assert first.wait(PATIENCE) == 0, said.read_text()
        assert "finished without trainer 1" in said.read_text()
        assert second.wait(20) == 0, (tmp_path / "second").read_text()
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
