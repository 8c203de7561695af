"""Real processes for tests of what ranks do together: started once, shared by all tests of a session.

``Crew.run(n, case, *args)`` calls a module-level ``case(world, *args)`` on n ranks and returns what each of them
returned. Ranks 0 … n − 1 of one crew serve every n, each n with a gloo group of its own on loopback. A case that fails
on any rank, or hangs, ends the crew; the next case gets a new one. Workers end when their pipe closes, so none outlives
pytest, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASE_SECONDS = 240.0
WAIT_SECONDS = 120.0  # what a single exchange may take


class Crew:
    """Workers, started as they are needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gnnfleet-ranks-")

    def run(self, size: int, case: Callable[..., Any], *args: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """[what case(world, *args) returned on rank r]; with one rank it runs here."""
        if size == 1:
            from gnnfleet.comm.world import World

            return [case(World(), *args)]
        while len(self._workers) < size:
            self._workers.append(self._start(len(self._workers)))
        order = pickle.dumps((size, case.__module__, case.__qualname__, args, seconds))
        team = [pipe for _, pipe in self._workers[:size]]
        for pipe in team:
            pipe.send_bytes(order)
        return self._collect(team, case.__qualname__, seconds)

    def _collect(self, team: list[Connection], name: str, seconds: float) -> list[Any]:
        end = time.monotonic() + seconds
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(found) + len(failed) < len(team):
            waiting = [pipe for rank, pipe in enumerate(team) if rank not in found and rank not in failed]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = team.index(pipe)
                good, result = _receive(pipe)
                (found if good else failed)[rank] = result
            if failed:  # those that wait for it find out by themselves, or never
                end = min(end, time.monotonic() + 2)
        if len(found) == len(team):
            return [found[rank] for rank in range(len(team))]
        self.stop()
        silent = [rank for rank in range(len(team)) if rank not in found and rank not in failed]
        text = "".join(f"\n--- rank {rank}:\n{trace}" for rank, trace in sorted(failed.items()))
        text += f"\n--- no answer from rank {silent} (where they stood is on standard error)" if silent else ""
        raise AssertionError(f"{name} on {len(team)} ranks{text}")

    def _start(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        here, there = Pipe()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": _python_path()}
        words = [sys.executable, "-m", "tests.ranks", str(there.fileno()), str(rank), self._folder.name]
        process = subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[there.fileno()])
        there.close()
        return process, here

    def stop(self) -> None:
        """End all workers at once; the next case starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.wait()
        self._workers.clear()
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="gnnfleet-ranks-")

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        good, result = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return False, "the process is gone"
    return bool(good), result


def _python_path() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


def _serve(pipe: Connection, rank: int, folder: str) -> None:
    """The life of a worker."""
    import torch

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    while True:
        try:
            order = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        size, module, name, args, seconds = pickle.loads(order)
        faulthandler.dump_traceback_later(0.9 * seconds)
        try:
            world = _world(rank, size, groups, folder)
            answer = True, getattr(importlib.import_module(module), name)(world, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answer))


def _join(name: str, rank: int, size: int, groups: dict[str, Any], folder: str) -> Any:
    """A group under a name, made once."""
    from torch.distributed import FileStore, ProcessGroupGloo

    if name not in groups:
        store = FileStore(f"{folder}/{name.replace('/', '-')}", size)
        groups[name] = ProcessGroupGloo(store, rank, size, timedelta(seconds=WAIT_SECONDS))
    return groups[name]


def _world(rank: int, size: int, groups: dict[str, Any], folder: str) -> Any:
    from gnnfleet.comm.world import World

    def make(name: str, place: int, count: int) -> Any:
        return _join(f"{size}-{name}", place, count, groups, folder)

    group = _join(str(size), rank, size, groups, folder)
    return World(rank=rank, size=size, group=group, timeout=WAIT_SECONDS, new_group=make)


def with_shelf(world: Any) -> Any:
    """The same ranks, which hand each other every row through shared memory."""
    from dataclasses import replace

    import torch

    from gnnfleet.comm.collectives import sum_over_ranks
    from gnnfleet.comm.shm_transport import open_shm_transport

    if world.size == 1:
        return world
    aside = world.uncounted()
    pids = torch.zeros(world.size, dtype=torch.int64)
    pids[world.rank] = os.getpid()
    every = sum_over_ranks(aside, pids).tolist()
    others = [None if rank == world.rank else pid for rank, pid in enumerate(every)]
    shelf = open_shm_transport(world.rank, others, lambda t: sum_over_ranks(aside, t))
    assert shelf is not None and shelf.pids == others
    shelf.min_bytes = 1
    return replace(world, shm=shelf)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
