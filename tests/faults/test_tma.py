"""tma when trainers, links or the coordinator fail: training continues with the rest and names the missing ones."""

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
from tests.faults.driving import FAST_TMA, MODEL, TmaDriver, TorchrunHost, start_on_host
from tests.faults.test_two_hosts import hosts
from tests.faults.trials import TIMEOUT, wait_until
from tests.shell import set_options

__all__ = ["hosts"]


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph on which half of the nodes train as well as all."""
    path = tmp_path_factory.mktemp("easy") / "shop"
    save_store(make_dataset("communities", nodes=4000, mean_degree=12, features=16, signal=2.0, seed=1), path)
    return path


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[list[TmaDriver]]:
    started: list[TmaDriver] = []
    yield started
    for fleet in started:
        fleet.process.kill()
        fleet.process.communicate()


def test_training_continues_after_two_of_four_trainers_die_and_one_pauses(
    drivers: list[TmaDriver], easy: Path, tmp_path: Path
) -> None:
    driver = TmaDriver(easy, tmp_path / "run", 4, "--seed", "1", train__epochs=36)
    drivers.append(driver)
    driver.wait_for_rounds(1, trainers=4)
    driver.process_of("3").kill()
    driver.process_of("2").kill()
    driver.wait_for_rounds(2, trainers=2)
    paused = driver.process_of("1")
    paused.suspend()
    driver.wait_for_rounds(2, trainers=1)
    before = len(driver.rows)
    paused.resume()
    wait_until(lambda: driver.rows[-1]["trainers"] == 2, TIMEOUT, "return")
    return_round = next(round_number for round_number, row in enumerate(driver.rows[before:]) if row["trainers"] == 2)
    assert return_round <= 2, "the round under way, and the next"
    code, stderr = driver.wait_for_exit()
    assert code == 0, stderr
    for i in (2, 3):
        assert (
            f"trainer {i} (pid " in stderr and "was killed by SIGKILL" in stderr and "continues without it" in stderr
        ), stderr
    assert "finished without trainer 1 (no heartbeat for " in stderr, stderr
    config = resolve(
        {
            "strategy": {"name": "tma", "interval": 0.2, "fanouts": [5, 5], "batch": 64},
            "model": {"name": "sage", "hidden": 8, "layers": 2},
            "train": {"epochs": 36},
            "workers": 4,
            "seed": 1,
        }
    )
    with trainers_in_threads(easy, config) as strategy:  # an undisturbed run
        rounds(strategy, 0, 20)
        undisturbed = strategy.evaluate("val")["accuracy"]
    assert max(row["val"] for row in driver.rows if "val" in row) > undisturbed - 0.02


def test_trainers_and_the_coordinator_are_restarted(drivers: list[TmaDriver], store: Path, tmp_path: Path) -> None:
    """Two parallel runs: in one a trainer and the coordinator are killed, in the other the coordinator hangs."""
    options = ("--max-restarts", "1", "--set", "train.checkpoint_seconds=0")
    killed = TmaDriver(store, tmp_path / "killed", 2, *options, train__epochs=52)
    hangs = TmaDriver(store, tmp_path / "hangs", 2, *options, train__epochs=20, strategy__give_up=16)
    drivers += [killed, hangs]
    hangs.wait_for_rounds(2, trainers=2)
    hangs.process_of("coordinator").suspend()
    killed.wait_for_rounds(1, trainers=2)
    killed.process_of("1").kill()
    killed.wait_for_rounds(1, trainers=1)
    killed.wait_for_rounds(1, trainers=2)
    killed.process_of("coordinator").kill()
    code, stderr = killed.wait_for_exit()
    assert code == 0, stderr
    assert "trainer 1 (pid " in stderr and "It is restarted." in stderr, stderr
    assert "coordinator (pid " in stderr and "resumes from the newest checkpoint" in stderr, stderr
    assert [row["epoch"] for row in killed.rows] == list(range(1, 53)) and killed.rows[-1]["trainers"] == 2
    code, stderr = hangs.wait_for_exit()
    assert code == 0, stderr
    assert "was killed: no heartbeat for " in stderr and "resumes from the newest checkpoint" in stderr, stderr
    assert [row["epoch"] for row in hangs.rows] == list(range(1, 21))


def test_a_trainer_that_is_cut_off_returns(
    hosts: tuple[TorchrunHost, TorchrunHost], store: Path, tmp_path: Path
) -> None:
    """The coordinator and a trainer on one host, a trainer on another; the link between them is cut for a while."""
    first_host, second_host = hosts
    address, run_dir, log = f"{first_host.address}:29411", tmp_path / "run", tmp_path / "first"
    settings = {**FAST_TMA, "strategy.listen": address, "strategy.local_trainers": 1, "train.epochs": 50}
    options = [*MODEL, *set_options(settings)]
    train = ["train", str(store), "-s", "tma", "-w", "2", "--run-dir", str(run_dir), *options]
    first = start_on_host(first_host.host, train, log)
    second: subprocess.Popen[str] | None = None
    try:
        wait_until(lambda: "Waiting for trainers" in log.read_text() or first.poll() is not None, TIMEOUT, "the server")
        second = start_on_host(second_host.host, ["join", address, str(store), "--trainers", "1"], tmp_path / "second")
        rows = lambda: read_metrics(run_dir / "metrics.jsonl")  # noqa: E731
        wait_until(lambda: any(row["trainers"] == 2 for row in rows()), TIMEOUT, "both trainers")
        second_host.host.cut()
        wait_until(lambda: rows()[-1]["trainers"] == 1, TIMEOUT, "rounds without it")
        before = len(rows())
        wait_until(lambda: len(rows()) >= before + 2, TIMEOUT, "more of them")
        before = len(rows())
        second_host.host.mend()
        wait_until(lambda: any(row["trainers"] == 2 for row in rows()[before:]), TIMEOUT, "return")
        assert first.wait(TIMEOUT) == 0, log.read_text()
        assert "finished without trainer 1" in log.read_text()
        assert second.wait(20) == 0, (tmp_path / "second").read_text()
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
