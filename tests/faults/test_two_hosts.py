"""Two network namespaces as two hosts, used as in docs/two-machines.md: a worker is killed, the link is cut."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import netns

from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import TorchrunHost, has_ended
from tests.faults.trials import TIMEOUT, wait_until
from tests.graphs import assert_same_checkpoints


@pytest.fixture
def hosts() -> Iterator[tuple[TorchrunHost, TorchrunHost]]:
    try:
        with netns.hosts(2) as namespaces:
            first, second = map(TorchrunHost, namespaces)
            yield first, second
            first.stop()
            second.stop()
    except netns.NoHosts as error:
        pytest.skip(str(error))


def count_epochs(run_dir: Path) -> int:
    return len(read_metrics(run_dir / "metrics.jsonl"))


def test_a_run_on_two_hosts_restarts_a_killed_worker_and_ends_with_the_same_weights(
    hosts: tuple[TorchrunHost, TorchrunHost], store: Path, uninterrupted_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ("--set", "train.epochs=80", "--set", "train.checkpoint_seconds=0.2", "--seed", "3")
    for host in hosts:
        host.start(hosts[0], run_dir, store, *options, restarts=2)
    wait_until(lambda: count_epochs(run_dir) >= 20, TIMEOUT, "epochs")
    hosts[1].worker().kill()
    for host in hosts:
        assert host.torchrun is not None
        assert host.torchrun.wait(TIMEOUT) == 0, host.stderr_path.read_text()
    assert_same_checkpoints(run_dir, uninterrupted_run)


def test_a_cut_link_ends_the_workers_on_both_hosts(
    hosts: tuple[TorchrunHost, TorchrunHost], store: Path, tmp_path: Path
) -> None:
    """The seed draws the moment; GNNFLEET_CUT_SEED sets another seed."""
    draw = random.Random(int(os.environ.get("GNNFLEET_CUT_SEED", "0")))
    run_dir = tmp_path / "run"
    for host in hosts:
        host.start(hosts[0], run_dir, store, "--set", "train.epochs=1000000")
    wait_until(lambda: count_epochs(run_dir) >= 5, TIMEOUT, "epochs")
    workers = [host.worker() for host in hosts]
    time.sleep(draw.uniform(0, 2.5))
    hosts[draw.randrange(2)].host.cut()  # at either end of the link: rank 0 reaches the store in both cases
    fault_time = time.monotonic()
    wait_until(lambda: all(has_ended(worker) for worker in workers), 15, "end of the workers")
    assert time.monotonic() - fault_time > 5
    first_stderr, second_stderr = (host.stderr_path.read_text() for host in hosts)
    assert (
        f"error: rank 0 exits: rank 1 (pid {workers[1].pid}" in first_stderr
        and "sent no heartbeat for 10 s" in first_stderr
    ), first_stderr
    assert "error: rank 1 has not reached the store" in second_stderr, second_stderr
