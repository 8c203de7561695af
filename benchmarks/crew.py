"""Several ranks for a benchmark: processes of the same script, on loopback or each on a host of its own.

A host is a network namespace (netns.py), which needs root.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from netns import hosts

SECONDS = 900


def run(
    words: list[str],
    size: int,
    *,
    rate: str | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> Any:
    """Start ``python WORDS`` as ``size`` ranks; what the first prints last, as JSON. With ``rate`` on hosts."""
    threads = max(1, (os.cpu_count() or 1) // size)
    with _hosts(size, rate) as hosts:
        port = _free_port() if rate is None else 29500
        running = []
        for rank in range(size):
            seat = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": hosts[0][1], "MASTER_PORT": port}
            env = {**os.environ, **{key: str(value) for key, value in seat.items()}}
            if rate is not None:
                env["GNNFLEET_SHARED_MEMORY"] = "0"  # hosts share no memory
            env |= {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
            env |= environment or {}
            line = [*hosts[rank][0], sys.executable, *words]
            running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env))
        try:
            said = [process.communicate(timeout=seconds)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        if any(process.returncode for process in running):
            raise RuntimeError(f"a rank failed: {[process.returncode for process in running]}")
        return json.loads(said[0].splitlines()[-1])


def as_rank(work: Callable[[Any], Any]) -> None:
    """Do ``work(world)`` as one of the ranks and print what it returns."""
    from gnnfleet.comm.launch_env import LaunchEnv
    from gnnfleet.comm.rendezvous import rendezvous
    from gnnfleet.comm.world import init_world

    seat = LaunchEnv.from_environment()
    assert seat is not None
    with rendezvous(seat, seconds=120) as meeting, init_world(meeting) as world:
        print(json.dumps(work(world)), flush=True)


@contextmanager
def _hosts(size: int, rate: str | None) -> Iterator[list[tuple[list[str], str]]]:
    """(what to put before a command, address) of every rank."""
    if rate is None:
        yield [([], "127.0.0.1")] * size
        return
    with hosts(size, rate=rate) as found:
        yield [(host.prefix, host.address) for host in found]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
