"""``gnnfleet train --workers N`` as its user meets it when something goes wrong: one message, a code, nothing left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gnnfleet.api import train
from gnnfleet.report.metrics import read_metrics
from tests.faults.conftest import SAME
from tests.faults.driving import MODEL, Driver
from tests.faults.trials import PATIENCE, until
from tests.graphs import assert_same_checkpoint


@pytest.fixture
def drive(store: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts commands by name; none of them outlives the test."""
    made: list[Driver] = []

    def begin(name: str, *words: str | Path, strategy: str = "sar") -> Driver:
        made.append(Driver(store, tmp_path / name, *words, strategy=strategy))
        return made[-1]

    yield begin
    for driver in made:
        driver.process.kill()
        driver.process.communicate()


ENDLESS = (*MODEL, "--set", "train.epochs=1000000", "--set", "train.checkpoint_seconds=1")


def test_every_end_is_a_clean_end(drive: Callable[..., Driver]) -> None:
    """Three commands side by side: a worker paused, Ctrl-C, the command itself killed. A worker is killed below."""
    names = ("paused", "interrupted", "orphaned")
    drivers = {name: drive(name, *ENDLESS) for name in names}
    for driver in drivers.values():
        driver.trains()
    begun = time.monotonic()
    drivers["paused"].workers[1].suspend()
    drivers["interrupted"].process.send_signal(signal.SIGINT)
    drivers["orphaned"].process.kill()
    assert drivers["orphaned"].ends(5)[0] == -signal.SIGKILL
    code, said = drivers["interrupted"].ends(10)
    assert code == 130 and "error: interrupted" in said and "Traceback" not in said, said
    code, said = drivers["paused"].ends(20)
    assert code == 8 and "error: rank 1 (pid " in said and "sent no heartbeat for 10 s" in said, said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert time.monotonic() - begun < 20


def test_lost_workers_are_started_again_and_nobody_can_tell(
    drive: Callable[..., Driver], whole_run: Path, tmp_path: Path
) -> None:
    words = ("--set", "train.epochs=80", "--set", "train.checkpoint_seconds=0.2", "--seed", "3", "--max-restarts", "2")
    driver = drive("cut", *MODEL, *words).trains(20)
    driver.workers[1].kill()
    until(lambda: not driver.workers[0].is_running(), 30, "end of the other worker")
    code, said = driver.ends(PATIENCE)
    assert code == 0, said
    for name in ("last", "best"):
        assert_same_checkpoint(tmp_path / "cut/checkpoints" / name, whole_run / "checkpoints" / name)
    assert [row["epoch"] for row in read_metrics(tmp_path / "cut/metrics.jsonl")] == list(range(1, 81))


def test_macrobatch_names_the_dead_and_goes_on(drive: Callable[..., Driver], store: Path, tmp_path: Path) -> None:
    """Killed while a thread fetches ahead and checkpoints fall into the middle of epochs."""
    knobs = {"fanouts": [3, 2], "batch": 4, "prefetch": 1, "batches_per_fetch": 3}
    settings = {f"strategy.{key}": value for key, value in knobs.items()}
    settings |= {"train.epochs": 12, "train.checkpoint_seconds": 0.05}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    driver = drive("cut", *MODEL, *words, "--seed", "3", strategy="macrobatch").trains(2)
    driver.workers[0].kill()
    begun = time.monotonic()
    code, said = driver.ends(20)
    assert code == 8 and "error: rank 0 (pid " in said and "was killed by SIGKILL" in said, said
    assert time.monotonic() - begun < 15
    assert said.count("error: ") == 1 and "Traceback" not in said and "torch" not in said, said
    code, said = drive("cut", *MODEL, *words, "--seed", "3", "--resume", strategy="macrobatch").ends(PATIENCE)
    assert code == 0, said
    strategy = {"name": "macrobatch", **knobs}
    train(store, **{**SAME, "strategy": strategy}, epochs=12, seed=3, run_dir=tmp_path / "whole")
    assert_same_checkpoint(tmp_path / "cut/checkpoints/last", tmp_path / "whole/checkpoints/last")


BAD_MODEL = """
import gnnfleet as gf


def make(config, graph, out_channels):
    import os
    if os.environ.get("RANK") == "1":
        {what}
    return gf.nn.build_model(gf.nn.SAGE(hidden=8, layers=2), graph, out_channels=out_channels)
"""


@pytest.mark.parametrize(
    ("what", "code", "message", "traces"),
    [
        ("raise KeyError('shoe')", 2, "mine.py", 0),
        ("os.kill(os.getpid(), 11)", 8, "rank 1 (pid ", 0),
    ],
)
def test_a_worker_that_fails_is_one_message(
    drive: Callable[..., Driver], tmp_path: Path, what: str, code: int, message: str, traces: int
) -> None:
    (tmp_path / "mine.py").write_text(BAD_MODEL.format(what=what))
    found, said = drive("run", "--model", f"{tmp_path / 'mine.py'}:make").ends(PATIENCE)
    assert found == code, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and said.count("Traceback") == traces, said
    assert not (tmp_path / "run" / ".launch").exists()
