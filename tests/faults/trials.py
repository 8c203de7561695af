"""A trial: ranks train, a fault hits one of them, and the ends of the others are recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnfleet.graph.graph import Graph
from gnnfleet.launch.spec import RunSpec
from gnnfleet.session.prepare import RunLocation, prepare_run, resolve_run
from tests.ranks import ROOT, python_path

TIMEOUT = 400.0
"""Seconds for processes that load torch on a busy machine."""


@dataclass
class Trial:
    """Pids of the ranks of one run; ``ended`` maps a pid to (exit code, time)."""

    folder: Path
    ranks: list[int]
    store: int
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)

    def send_signal(self, rank: int, signal: int) -> float:
        """Send a signal; return the time."""
        assert self.ranks[rank] not in self.ended, f"rank {rank} had ended before the signal"
        os.kill(self.ranks[rank], signal)
        return time.monotonic()

    def wait(self, seconds: float) -> dict[int, tuple[int, float]]:
        """Wait until all ranks have ended; {rank: (exit code, time)}."""
        wait_until(lambda: all(pid in self.ended for pid in self.ranks), seconds, f"end of {self.folder.name}")
        return {rank: self.ended[pid] for rank, pid in enumerate(self.ranks)}

    def output(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.err").read_text()


class ForkServer:
    """The process that forks ranks (forks.py), and a thread that reads its answers."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONPATH": python_path()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ended: dict[int, tuple[int, float]] = {}
        self._answers: list[dict[str, Any]] = []
        self._lock = threading.Lock()  # answers arrive in the order of requests
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ended" in message:
                self._ended[message["ended"]] = (message["code"], message["at"])
            else:
                self._answers.append(message)

    def start(self, spec: str, folder: Path, *, size: int) -> Trial:
        assert self._process.stdin is not None
        folder.mkdir(parents=True)
        with self._lock:
            self._process.stdin.write(json.dumps({"spec": spec, "folder": str(folder), "size": size}) + "\n")
            self._process.stdin.flush()
            wait_until(lambda: bool(self._answers), TIMEOUT, "an answer")
            answer = self._answers.pop()
        return Trial(folder, answer["ranks"], answer["store"], self._ended)

    def wait_until_ready(self, trial: Trial) -> None:
        """Wait until all ranks have joined and are about to build."""
        files = [trial.folder / f"rank-{rank}.ready" for rank in range(len(trial.ranks))]
        ended = lambda: [rank for rank, pid in enumerate(trial.ranks) if pid in trial.ended]  # noqa: E731
        wait_until(lambda: bool(ended()) or all(file.exists() for file in files), TIMEOUT, "rendezvous of all ranks")
        assert not ended(), [trial.output(rank) for rank in ended()]

    def close(self) -> None:
        """End the server; its ranks die with it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def spec_of(store: Graph, run_dir: Path, base: dict[str, Any], **train: Any) -> RunSpec:
    """Prepare a run for its ranks; resume it if its directory exists."""
    settings = {**base, "train": {**base["train"], **train}}
    location = RunLocation(run_dir, resume=run_dir.exists())
    config, directory = resolve_run(store, settings, location, quiet=True)
    with prepare_run(store, config, directory, location=location, quiet=True) as (spec, _):
        return spec


def wait_until(condition: Callable[[], bool], seconds: float, name: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {name} within {seconds:.0f} s"
        time.sleep(0.01)
