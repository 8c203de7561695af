"""Two network namespaces as two machines: torchrun on both, a worker killed, the link between them cut.

What docs/two-machines.md tells users to do is done here.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import netns

from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import Machine, gone
from tests.faults.trials import PATIENCE, until
from tests.graphs import assert_same_checkpoint


@pytest.fixture
def hosts() -> Iterator[tuple[Machine, Machine]]:
    try:
        with netns.hosts(2) as found:
            one, two = map(Machine, found)
            yield one, two
            one.stop()
            two.stop()
    except netns.NoHosts as error:
        pytest.skip(str(error))


def epochs(run_dir: Path) -> int:
    return len(read_metrics(run_dir / "metrics.jsonl"))


def test_two_hosts_train_lose_a_worker_and_go_on(
    hosts: tuple[Machine, Machine], store: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ("--set", "train.epochs=80", "--set", "train.checkpoint_seconds=0.2", "--seed", "3")
    for host in hosts:
        host.start(hosts[0], run_dir, store, *words, restarts=2)
    until(lambda: epochs(run_dir) >= 20, PATIENCE, "epochs")
    hosts[1].worker().kill()
    for host in hosts:
        assert host.torchrun is not None
        assert host.torchrun.wait(PATIENCE) == 0, host.said.read_text()
    for name in ("last", "best"):
        assert_same_checkpoint(run_dir / "checkpoints" / name, whole_run / "checkpoints" / name)


def test_a_cut_link_ends_the_workers_on_both_sides(hosts: tuple[Machine, Machine], store: Path, tmp_path: Path) -> None:
    """At a moment of the seed's choosing; GNNFLEET_CUT_SEED tries others."""
    draw = random.Random(int(os.environ.get("GNNFLEET_CUT_SEED", "0")))
    run_dir = tmp_path / "run"
    for host in hosts:
        host.start(hosts[0], run_dir, store, "--set", "train.epochs=1000000")
    until(lambda: epochs(run_dir) >= 5, PATIENCE, "epochs")
    workers = [host.worker() for host in hosts]
    time.sleep(draw.uniform(0, 2.5))
    hosts[draw.randrange(2)].host.cut()  # either end of the cable: who is near the store stays the same
    begun = time.monotonic()
    until(lambda: all(gone(worker) for worker in workers), 15, "end of the workers")
    assert time.monotonic() - begun > 5
    near, far = (host.said.read_text() for host in hosts)
    assert f"error: rank 0 exits: rank 1 (pid {workers[1].pid}" in near and "sent no heartbeat for 10 s" in near, near
    assert "error: rank 1 has not reached the store" in far, far
