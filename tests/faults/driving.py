"""Commands at work, so that something can be done to them: ``--workers N``, a fleet, torchrun on hosts.

The tests of faults and ``python -m tests.faults`` share it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from benchmarks.netns import Host

from gnnfleet.report.metrics import read_metrics
from tests.faults.trials import PATIENCE, until
from tests.shell import start

RECIPE = Path(__file__).parents[2] / "examples" / "clusters" / "torchrun.sh"
MODEL = ("--set", "model.hidden=8", "--set", "model.layers=2")
QUICK = {"strategy.interval": 0.2, "strategy.silence": 1.5, "strategy.fanouts": "[5,5]", "strategy.batch": 64}


class Driver:
    """A command with two workers; knows its processes and ports, also after they are gone."""

    def __init__(self, store: Path, run_dir: Path, *words: str | Path, strategy: str = "sar") -> None:
        self.run_dir = run_dir
        self.process = start("train", store, "-s", strategy, "-w", "2", "--run-dir", run_dir, *words)
        self.workers: dict[int, psutil.Process] = {}
        self.ports: list[int] = []

    def trains(self, epochs: int = 3) -> Driver:
        """Wait until some epochs are done."""
        until(lambda: len(read_metrics(self.run_dir / "metrics.jsonl")) >= epochs or self.ended, PATIENCE, "epochs")
        assert not self.ended, self.process.communicate()
        self.workers = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.workers[int(child.environ()["RANK"])] = child
        assert sorted(self.workers) == [0, 1]
        self.ports = [
            connection.laddr.port
            for one in (psutil.Process(self.process.pid), *self.workers.values())
            for connection in one.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        return self

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ends(self, seconds: float) -> tuple[int, str]:
        """(exit code, what was said) of a command that leaves no process and no port behind."""
        _, said = self.process.communicate(timeout=seconds)
        until(lambda: not any(worker.is_running() for worker in self.workers.values()), 5, "end of all workers")
        listening = {c.laddr.port for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
        assert not listening & set(self.ports)
        return self.process.returncode, said


class Fleet:
    """A command with a coordinator and trainers."""

    def __init__(self, store: Path, run_dir: Path, workers: int, *more: str, **settings: Any) -> None:
        knobs = {**QUICK, **{key.replace("__", "."): value for key, value in settings.items()}}
        words = [word for key, value in knobs.items() for word in ("--set", f"{key}={value}")]
        self.run_dir = run_dir
        self.process = start(
            "train", store, "-s", "tma", "-w", str(workers), "--run-dir", run_dir, *MODEL, *words, *more
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def member(self, role: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[-1:] == [role]:
                return child
        raise AssertionError(f"no {role}")

    def runs(self, rounds: int, *, trainers: int | None = None) -> list[dict[str, Any]]:
        """Wait until so many more rounds are closed, the last of them by so many trainers."""
        seen = len(self.rows) + rounds

        def there() -> bool:
            rows = self.rows
            return len(rows) >= seen and (trainers is None or rows[-1]["trainers"] == trainers)

        until(lambda: there() or self.process.poll() is not None, PATIENCE, f"{rounds} rounds")
        assert self.process.poll() is None, self.process.communicate()
        return self.rows

    def ends(self) -> tuple[int, str]:
        known = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        _, said = self.process.communicate(timeout=PATIENCE)
        until(lambda: not any(child.is_running() for child in known), 8, "end of the fleet")
        return self.process.returncode, said


class Machine:
    """A host on which torchrun starts one of two workers."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.address = host.address
        self.torchrun: subprocess.Popen[str] | None = None
        self.said = Path()

    def start(
        self, first: Machine, run_dir: Path, store: Path, *words: str, restarts: int = 0, strategy: str = "sar"
    ) -> None:
        """One worker, by the recipe for torchrun."""
        words = ("--strategy", strategy, *MODEL, *words)
        seat = {"FIRST": first.address, "NODE": int(self is not first), "RESTARTS": restarts}
        env = {**environment(), **{key: str(value) for key, value in seat.items()}, "STORE": str(store)}
        self.said = run_dir.with_name(f"{run_dir.name}-{self.host.number}.err")
        with self.said.open("w") as file:
            self.torchrun = self.host.popen(
                [str(RECIPE), *words], stdout=subprocess.DEVNULL, stderr=file, env={**env, "RUN": str(run_dir)}
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


def environment() -> dict[str, str]:
    """For a process whose ``python`` is this one."""
    paths = {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", **paths}


def within(host: Host, line: list[str], said: Path) -> subprocess.Popen[str]:
    """``gnnfleet LINE`` on a host."""
    with said.open("w") as file:
        command = [sys.executable, "-m", "gnnfleet", *line]
        return host.popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment())


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
