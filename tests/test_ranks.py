"""The crew itself: failures are told with their traceback, hangs end, nobody is left."""

from __future__ import annotations

import os
import time

import pytest

from gnnfleet.comm.world import World
from tests.ranks import Crew


def fails_on_one(world: World) -> int:
    if world.rank == 1:
        raise ValueError("what went wrong")
    return world.rank


def hangs_on_one(world: World) -> None:
    while world.rank == 0:
        time.sleep(0.1)


def process(world: World) -> int:
    return os.getpid()


def test_failures_and_hangs() -> None:
    crew = Crew()
    pids = crew.run(2, process)
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*what went wrong"):
        crew.run(2, fails_on_one)
    with pytest.raises(AssertionError, match=r"no answer from rank \[0\]"):
        crew.run(2, process)  # a new crew, started before the clock runs
        crew.run(2, hangs_on_one, seconds=1)
    crew.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
