"""Faults of ``gnnfleet train --workers N`` as its user sees them: one message, an exit code, no process left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnfleet.api import train
from gnnfleet.report.metrics import read_metrics
from tests.faults.conftest import UNINTERRUPTED
from tests.faults.driving import MODEL, Driver
from tests.faults.trials import TIMEOUT, wait_until
from tests.graphs import assert_same_checkpoint, assert_same_checkpoints
from tests.shell import set_options

ENDLESS = (*MODEL, "--set", "train.epochs=1000000", "--set", "train.checkpoint_seconds=1")


def test_a_paused_an_interrupted_and_a_killed_run_leave_nothing(drive: Callable[..., Driver]) -> None:
    """Three parallel commands: a worker paused, Ctrl-C, the command itself killed. Another test kills a worker."""
    names = ("paused", "interrupted", "orphaned")
    drivers = {name: drive(name, *ENDLESS) for name in names}
    for driver in drivers.values():
        driver.wait_for_epochs()
    fault_time = time.monotonic()
    drivers["paused"].workers[1].suspend()
    drivers["interrupted"].process.send_signal(signal.SIGINT)
    drivers["orphaned"].process.kill()
    assert drivers["orphaned"].wait_for_exit(5)[0] == -signal.SIGKILL
    code, stderr = drivers["interrupted"].wait_for_exit(10)
    assert code == 130 and "error: interrupted" in stderr and "Traceback" not in stderr, stderr
    code, stderr = drivers["paused"].wait_for_exit(20)
    assert code == 8 and "error: rank 1 (pid " in stderr and "sent no heartbeat for 10 s" in stderr, stderr
    assert stderr.count("error: ") == 1 and "Traceback" not in stderr, stderr
    assert time.monotonic() - fault_time < 20


def test_restarted_workers_train_to_the_same_weights(
    drive: Callable[..., Driver], uninterrupted_run: Path, tmp_path: Path
) -> None:
    options = set_options({"train.epochs": 80, "train.checkpoint_seconds": 0.2, "seed": 3})
    driver = drive("cut", *MODEL, *options, "--max-restarts", "2").wait_for_epochs(20)
    driver.workers[1].kill()
    wait_until(lambda: not driver.workers[0].is_running(), 30, "end of the other worker")
    code, stderr = driver.wait_for_exit(TIMEOUT)
    assert code == 0, stderr
    assert_same_checkpoints(tmp_path / "cut", uninterrupted_run)
    assert [row["epoch"] for row in read_metrics(tmp_path / "cut/metrics.jsonl")] == list(range(1, 81))


def test_macrobatch_names_a_killed_rank_and_resumes_exactly(
    drive: Callable[..., Driver], store: Path, tmp_path: Path
) -> None:
    """The rank is killed while a thread prefetches and checkpoints fall into the middle of epochs."""
    sampling = {"fanouts": [3, 2], "batch": 4, "prefetch": 1, "batches_per_fetch": 3}
    settings = {f"strategy.{key}": value for key, value in sampling.items()}
    settings |= {"train.epochs": 12, "train.checkpoint_seconds": 0.05}
    options = set_options(settings)
    driver = drive("cut", *MODEL, *options, "--seed", "3", strategy="macrobatch").wait_for_epochs(2)
    driver.workers[0].kill()
    fault_time = time.monotonic()
    code, stderr = driver.wait_for_exit(20)
    assert code == 8 and "error: rank 0 (pid " in stderr and "was killed by SIGKILL" in stderr, stderr
    assert time.monotonic() - fault_time < 15
    assert stderr.count("error: ") == 1 and "Traceback" not in stderr and "torch" not in stderr, stderr
    code, stderr = drive("cut", *MODEL, *options, "--seed", "3", "--resume", strategy="macrobatch").wait_for_exit(
        TIMEOUT
    )
    assert code == 0, stderr
    strategy = {"name": "macrobatch", **sampling}
    train(store, **{**UNINTERRUPTED, "strategy": strategy}, epochs=12, seed=3, run_dir=tmp_path / "uninterrupted")
    assert_same_checkpoint(tmp_path / "cut/checkpoints/last", tmp_path / "uninterrupted/checkpoints/last")


BAD_MODEL = """
import gnnfleet as gf


def make(config, graph, out_channels):
    import os
    if os.environ.get("RANK") == "1":
        {statement}
    return gf.nn.build_model(gf.nn.SAGE(hidden=8, layers=2), graph, out_channels=out_channels)
"""


@pytest.mark.parametrize(
    ("statement", "code", "message", "traces"),
    [
        ("raise KeyError('shoe')", 2, "mine.py", 0),
        ("os.kill(os.getpid(), 11)", 8, "rank 1 (pid ", 0),
    ],
)
def test_a_failing_worker_is_reported_in_one_message(
    drive: Callable[..., Driver], tmp_path: Path, statement: str, code: int, message: str, traces: int
) -> None:
    (tmp_path / "mine.py").write_text(BAD_MODEL.format(statement=statement))
    exit_code, stderr = drive("run", "--model", f"{tmp_path / 'mine.py'}:make").wait_for_exit(TIMEOUT)
    assert exit_code == code, stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and stderr.count("Traceback") == traces, stderr
    assert not (tmp_path / "run" / ".launch").exists()
