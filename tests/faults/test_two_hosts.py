"""Two network namespaces as two machines: torchrun on both, a worker killed, the link between them cut.

What docs/two-machines.md tells users to do is done here.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gnnfleet.report.metrics import read_metrics
from tests.faults.trials import PATIENCE, until
from tests.run.graphs import assert_same_checkpoint

MODEL = ["--set", "model.hidden=8", "--set", "model.layers=2"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """A network namespace with an address; ``cut`` takes its cable out."""

    def __init__(self, number: int) -> None:
        self.name = f"gnnfleet{os.getpid()}-{number}"
        self.cable = f"gf{os.getpid() % 100_000}-{number}"
        self.address = f"10.213.7.{number}"
        self.number = number
        self.torchrun: subprocess.Popen[str] | None = None
        self.said = Path()

    def up(self) -> None:
        ip("link", "set", self.cable, "netns", self.name)
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.cable)
        for device in ("lo", self.cable):
            ip("-n", self.name, "link", "set", device, "up")

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.cable, "down")

    def start(self, first: Host, run_dir: Path, store: Path, *words: str, restarts: int = 0) -> None:
        """One worker, as the page says."""
        torchrun = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts), "--rdzv-id", "shop"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400"]
        torchrun += ["--rdzv-conf", f"is_host={int(self is first)}", "--local-addr", self.address]
        line = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "gnnfleet", "train", str(store)]
        line += ["--strategy", "sar", *MODEL, "--run-dir", str(run_dir), *words]
        python = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONPATH": python}
        self.said = run_dir.with_name(f"{run_dir.name}-{self.number}.err")
        with self.said.open("w") as file:
            self.torchrun = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *line], stdout=subprocess.DEVNULL, stderr=file, text=True, env=env
            )

    def worker(self) -> psutil.Process:
        assert self.torchrun is not None
        (found,) = psutil.Process(self.torchrun.pid).children()
        return found

    def stop(self) -> None:
        """torchrun on the far side of a cut link does not notice for minutes; its worker is gone by then."""
        if self.torchrun is not None:
            self.torchrun.kill()
            self.torchrun.wait()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    one, two = Host(1), Host(2)
    try:
        ip("netns", "add", one.name)
        ip("netns", "add", two.name)
        ip("link", "add", one.cable, "type", "veth", "peer", "name", two.cable)
        one.up()
        two.up()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    yield one, two
    for host in (one, two):
        host.stop()
        subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


def epochs(run_dir: Path) -> int:
    return len(read_metrics(run_dir / "metrics.jsonl"))


def test_two_hosts_train_lose_a_worker_and_go_on(
    hosts: tuple[Host, Host], store: Path, whole_run: Path, tmp_path: Path
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


def test_a_cut_link_ends_the_workers_on_both_sides(hosts: tuple[Host, Host], store: Path, tmp_path: Path) -> None:
    """At a moment of the seed's choosing; GNNFLEET_CUT_SEED tries others."""
    draw = random.Random(int(os.environ.get("GNNFLEET_CUT_SEED", "0")))
    run_dir = tmp_path / "run"
    for host in hosts:
        host.start(hosts[0], run_dir, store, "--set", "train.epochs=1000000")
    until(lambda: epochs(run_dir) >= 5, PATIENCE, "epochs")
    workers = [host.worker() for host in hosts]
    time.sleep(draw.uniform(0, 2.5))
    hosts[draw.randrange(2)].cut()  # either end of the cable: who is near the store stays the same
    begun = time.monotonic()
    until(lambda: all(gone(worker) for worker in workers), 15, "end of the workers")
    assert time.monotonic() - begun > 5
    near, far = (host.said.read_text() for host in hosts)
    assert f"error: rank 0 ends: rank 1 (pid {workers[1].pid}" in near and "no sign of life for 10 s" in near, near
    assert "error: rank 1 has not reached the store" in far, far


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
