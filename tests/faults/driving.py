"""Running commands as targets of faults: ``--workers N``, tma with its coordinator, torchrun on hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from benchmarks.netns import Host

from gnnfleet.report.metrics import read_metrics
from tests.faults.trials import TIMEOUT, wait_until
from tests.shell import child_environment, set_options, start

RECIPE = Path(__file__).parents[2] / "examples" / "clusters" / "torchrun.sh"
MODEL = ("--set", "model.hidden=8", "--set", "model.layers=2", "--set", "auto_defaults=false")
FAST_TMA = {"strategy.interval": 0.2, "strategy.silence": 1.5, "strategy.fanouts": "[5,5]", "strategy.batch": 64}


class Driver:
    """A training command with two workers; remembers its processes and ports after they have ended."""

    def __init__(self, store: Path, run_dir: Path, *arguments: str | Path, strategy: str = "sar") -> None:
        self.run_dir = run_dir
        self.process = start("train", store, "-s", strategy, "-w", "2", "--run-dir", run_dir, *arguments)
        self.workers: dict[int, psutil.Process] = {}
        self.ports: list[int] = []

    def wait_for_epochs(self, epochs: int = 3) -> Driver:
        """Wait until ``epochs`` epochs are done."""
        wait_until(
            lambda: len(read_metrics(self.run_dir / "metrics.jsonl")) >= epochs or self.has_exited, TIMEOUT, "epochs"
        )
        assert not self.has_exited, self.process.communicate()
        self.workers = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.workers[int(child.environ()["RANK"])] = child
        assert sorted(self.workers) == [0, 1]
        self.ports = [
            connection.laddr.port
            for process in (psutil.Process(self.process.pid), *self.workers.values())
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        return self

    @property
    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def wait_for_exit(self, seconds: float) -> tuple[int, str]:
        """Return (exit code, stderr) and check that no process and no port is left."""
        _, stderr = self.process.communicate(timeout=seconds)
        wait_until(lambda: not any(worker.is_running() for worker in self.workers.values()), 5, "end of all workers")
        listening = {c.laddr.port for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
        assert not listening & set(self.ports)
        return self.process.returncode, stderr


class TmaDriver:
    """A training command of tma: a coordinator and trainers."""

    def __init__(self, store: Path, run_dir: Path, workers: int, *arguments: str, **settings: Any) -> None:
        options = set_options({**FAST_TMA, **{key.replace("__", "."): value for key, value in settings.items()}})
        self.run_dir = run_dir
        self.process = start(
            "train", store, "-s", "tma", "-w", str(workers), "--run-dir", run_dir, *MODEL, *options, *arguments
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def process_of(self, role: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[-1:] == [role]:
                return child
        raise AssertionError(f"no {role}")

    def wait_for_rounds(self, rounds: int, *, trainers: int | None = None) -> list[dict[str, Any]]:
        """Wait until ``rounds`` more rounds are closed, the last of them by ``trainers`` trainers."""
        target = len(self.rows) + rounds

        def are_closed() -> bool:
            rows = self.rows
            return len(rows) >= target and (trainers is None or rows[-1]["trainers"] == trainers)

        wait_until(lambda: are_closed() or self.process.poll() is not None, TIMEOUT, f"{rounds} rounds")
        assert self.process.poll() is None, self.process.communicate()
        return self.rows

    def wait_for_exit(self) -> tuple[int, str]:
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        _, stderr = self.process.communicate(timeout=TIMEOUT)
        wait_until(
            lambda: not any(child.is_running() for child in children), 8, "end of the coordinator and the trainers"
        )
        return self.process.returncode, stderr


class TorchrunHost:
    """A host on which torchrun starts one of two workers."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.address = host.address
        self.torchrun: subprocess.Popen[str] | None = None
        self.stderr_path = Path()

    def start(
        self, first: TorchrunHost, run_dir: Path, store: Path, *arguments: str, restarts: int = 0, strategy: str = "sar"
    ) -> None:
        """Start one worker with the recipe for torchrun."""
        arguments = ("--strategy", strategy, *MODEL, *arguments)
        variables = {"FIRST": first.address, "NODE": int(self is not first), "RESTARTS": restarts}
        env = {**environment(), **{key: str(value) for key, value in variables.items()}, "STORE": str(store)}
        self.stderr_path = run_dir.with_name(f"{run_dir.name}-{self.host.number}.err")
        with self.stderr_path.open("w") as file:
            self.torchrun = self.host.popen(
                [str(RECIPE), *arguments], stdout=subprocess.DEVNULL, stderr=file, env={**env, "RUN": str(run_dir)}
            )

    def worker(self) -> psutil.Process:
        assert self.torchrun is not None
        (worker,) = psutil.Process(self.torchrun.pid).children()
        return worker

    def stop(self) -> None:
        """End torchrun: beyond a cut link it does not notice the end of its worker for minutes."""
        if self.torchrun is not None:
            self.torchrun.kill()
            self.torchrun.wait()


def environment() -> dict[str, str]:
    """Environment for a process whose ``python`` is this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return child_environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL", PATH=path)


def start_on_host(host: Host, arguments: list[str], stderr_path: Path) -> subprocess.Popen[str]:
    with stderr_path.open("w") as file:
        command = [sys.executable, "-m", "gnnfleet", *arguments]
        return host.popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment())


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
