"""A trial: some ranks at work, something done to one of them, how the others ended."""

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

ROOT = Path(__file__).parents[2]
PATIENCE = 400.0
"""For processes that load torch on a machine that is busy with other things."""


@dataclass
class Trial:
    """Ranks of one run by pid; ``ended`` gets (exit code, when) of each."""

    folder: Path
    ranks: list[int]
    store: int
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)

    def hit(self, rank: int, signal: int) -> float:
        """Send a signal; when that was."""
        assert self.ranks[rank] not in self.ended, f"rank {rank} had ended before: nothing was tried"
        os.kill(self.ranks[rank], signal)
        return time.monotonic()

    def wait(self, seconds: float, *, but: int | None = None) -> dict[int, tuple[int, float]]:
        """{rank: (exit code, when)} once all ranks have ended, or all but one."""
        wanted = [rank for rank in range(len(self.ranks)) if rank != but]
        until(lambda: all(self.ranks[rank] in self.ended for rank in wanted), seconds, f"{self.folder.name} ended")
        return {rank: self.ended[pid] for rank, pid in enumerate(self.ranks) if pid in self.ended}

    def said(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.err").read_text()


class Forks:
    """The process that ranks are forked from (forks.py), and a thread that listens to it."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
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
        self._one = threading.Lock()  # answers come in the order of orders
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word = json.loads(line)
            if "ended" in word:
                self._ended[word["ended"]] = (word["code"], word["at"])
            else:
                self._answers.append(word)

    def start(self, spec: str, folder: Path, *, size: int) -> Trial:
        assert self._process.stdin is not None
        folder.mkdir(parents=True)
        with self._one:
            self._process.stdin.write(json.dumps({"spec": spec, "folder": str(folder), "size": size}) + "\n")
            self._process.stdin.flush()
            until(lambda: bool(self._answers), PATIENCE, "an answer")
            answer = self._answers.pop()
        return Trial(folder, answer["ranks"], answer["store"], self._ended)

    def ready(self, trial: Trial) -> None:
        """All ranks have met and are about to build."""
        files = [trial.folder / f"rank-{rank}.ready" for rank in range(len(trial.ranks))]
        until(lambda: all(file.exists() for file in files), PATIENCE, "ranks that meet")

    def close(self) -> None:
        """Ranks die with the process they were forked from."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def spec_of(store: Graph, run_dir: Path, base: dict[str, Any], **train: Any) -> RunSpec:
    """A run ready for its ranks: begun, or gone on with where its directory is there."""
    words = {**base, "train": {**base["train"], **train}}
    location = RunLocation(run_dir, resume=run_dir.exists())
    config, directory = resolve_run(store, words, location)
    with prepare_run(store, config, directory, location=location, quiet=True) as (spec, _):
        return spec


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.01)
