"""Rank processes for a benchmark: the same script on several ranks, on loopback or each on a host of its own.

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


def run_ranks(
    arguments: list[str],
    size: int,
    *,
    rate: str | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> Any:
    """Run ``python ARGUMENTS`` as ``size`` ranks, with ``rate`` on hosts; return the JSON that rank 0 prints last."""
    threads = max(1, (os.cpu_count() or 1) // size)
    with _hosts(size, rate) as rank_hosts:
        port = _free_port() if rate is None else 29500
        processes = []
        for rank in range(size):
            launch = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": rank_hosts[0][1], "MASTER_PORT": port}
            env = {**os.environ, **{key: str(value) for key, value in launch.items()}}
            if rate is not None:
                env["GNNFLEET_SHARED_MEMORY"] = "0"  # hosts share no memory
            env |= {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
            env |= environment or {}
            command = [*rank_hosts[rank][0], sys.executable, *arguments]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        try:
            outputs = [process.communicate(timeout=seconds)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError(f"a rank failed, exit codes: {[process.returncode for process in processes]}")
        return json.loads(outputs[0].splitlines()[-1])


def run_as_rank(work: Callable[[Any], Any]) -> None:
    """Call ``work(world)`` as one of the ranks and print its result as JSON."""
    from gnnfleet.comm.launch_env import LaunchEnv
    from gnnfleet.comm.rendezvous import rendezvous
    from gnnfleet.comm.world import init_world

    env = LaunchEnv.from_environment()
    assert env is not None
    with rendezvous(env, seconds=120) as joined, init_world(joined) as world:
        print(json.dumps(work(world)), flush=True)


@contextmanager
def _hosts(size: int, rate: str | None) -> Iterator[list[tuple[list[str], str]]]:
    """(prefix of a command, address) of every rank."""
    if rate is None:
        yield [([], "127.0.0.1")] * size
        return
    with hosts(size, rate=rate) as namespaces:
        yield [(host.prefix, host.address) for host in namespaces]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
