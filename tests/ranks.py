"""Rank processes for tests of distributed code: started once, shared by all tests of a session.

``RankPool.run(n, case, *args)`` calls a module-level ``case(world, *args)`` on n ranks and returns their results by
rank. Ranks 0 … n − 1 of one pool serve every n, each n with a gloo group of its own on loopback. A case that fails or
hangs on any rank ends the workers; the next case starts new ones. Workers end when their pipe closes, so none outlives
pytest.
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
WAIT_SECONDS = 120.0  # limit of a single exchange


def python_path() -> str:
    """PYTHONPATH with which a child process imports gnnfleet and the tests."""
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])


class RankPool:
    """Worker processes, started on first use."""

    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gnnfleet-ranks-")

    def run(self, size: int, case: Callable[..., Any], *args: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """Results of ``case(world, *args)`` by rank; a case on one rank runs in this process."""
        if size == 1:
            from gnnfleet.comm.world import World

            return [case(World(), *args)]
        while len(self._workers) < size:
            self._workers.append(self._start(len(self._workers)))
        call = pickle.dumps((size, case.__module__, case.__qualname__, args, seconds))
        pipes = [pipe for _, pipe in self._workers[:size]]
        for pipe in pipes:
            pipe.send_bytes(call)
        return self._collect(pipes, case.__qualname__, seconds)

    def _collect(self, pipes: list[Connection], name: str, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < len(pipes):
            pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results and rank not in errors]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                succeeded, answer = _receive(pipe)
                (results if succeeded else errors)[pipes.index(pipe)] = answer
            if errors:  # ranks that wait for a failed one fail soon, or never
                deadline = min(deadline, time.monotonic() + 2)
        if len(results) == len(pipes):
            return [results[rank] for rank in range(len(pipes))]
        self.stop()
        silent = [rank for rank in range(len(pipes)) if rank not in results and rank not in errors]
        text = "".join(f"\n--- rank {rank}:\n{trace}" for rank, trace in sorted(errors.items()))
        text += f"\n--- no answer from rank {silent} (stack traces are on standard error)" if silent else ""
        raise AssertionError(f"{name} on {len(pipes)} ranks{text}")

    def _start(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        pipe, worker_pipe = Pipe()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path()}
        command = [sys.executable, "-m", "tests.ranks", str(worker_pipe.fileno()), str(rank), self._folder.name]
        process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[worker_pipe.fileno()])
        worker_pipe.close()
        return process, pipe

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
        succeeded, answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return False, "the process has ended"
    return bool(succeeded), answer


def _serve(pipe: Connection, rank: int, folder: str) -> None:
    """Run the cases that arrive on the pipe until it closes."""
    import torch

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        size, module, name, args, seconds = pickle.loads(call)
        faulthandler.dump_traceback_later(0.9 * seconds)
        try:
            world = _world(rank, size, groups, folder)
            answer = True, getattr(importlib.import_module(module), name)(world, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answer))


def _cached_group(name: str, rank: int, size: int, groups: dict[str, Any], folder: str) -> Any:
    from torch.distributed import FileStore, ProcessGroupGloo

    if name not in groups:
        store = FileStore(f"{folder}/{name.replace('/', '-')}", size)
        groups[name] = ProcessGroupGloo(store, rank, size, timedelta(seconds=WAIT_SECONDS))
    return groups[name]


def _world(rank: int, size: int, groups: dict[str, Any], folder: str) -> Any:
    from gnnfleet.comm.world import World

    def new_group(name: str, group_rank: int, group_size: int) -> Any:
        return _cached_group(f"{size}-{name}", group_rank, group_size, groups, folder)

    group = _cached_group(str(size), rank, size, groups, folder)
    return World(rank=rank, size=size, group=group, timeout=WAIT_SECONDS, new_group=new_group)


def with_shm_transport(world: Any) -> Any:
    """Collective. The same ranks, which pass every row through shared memory."""
    from dataclasses import replace

    import torch

    from gnnfleet.comm.collectives import sum_over_ranks
    from gnnfleet.comm.shm_transport import open_shm_transport

    if world.size == 1:
        return world
    uncounted = world.uncounted()
    pids = torch.zeros(world.size, dtype=torch.int64)
    pids[world.rank] = os.getpid()
    all_pids = sum_over_ranks(uncounted, pids).tolist()
    peer_pids = [None if rank == world.rank else pid for rank, pid in enumerate(all_pids)]
    transport = open_shm_transport(world.rank, peer_pids, lambda t: sum_over_ranks(uncounted, t))
    assert transport is not None and transport.pids == peer_pids
    transport.min_bytes = 1
    return replace(world, shm=transport)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
