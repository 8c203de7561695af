"""RankPool: failures are reported with their traceback, hangs end, no worker outlives the pool."""

from __future__ import annotations

import os
import time

import pytest

from gnnfleet.comm.world import World
from tests.ranks import RankPool


def fail_on_rank_1(world: World) -> int:
    if world.rank == 1:
        raise ValueError("message of the failure")
    return world.rank


def hang_on_rank_0(world: World) -> None:
    while world.rank == 0:
        time.sleep(0.1)


def process_id(world: World) -> int:
    return os.getpid()


def test_failures_and_hangs_are_reported_and_end_all_workers() -> None:
    pool = RankPool()
    pids = pool.run(2, process_id)
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*message of the failure"):
        pool.run(2, fail_on_rank_1)
    with pytest.raises(AssertionError, match=r"no answer from rank \[0\]"):
        pool.run(2, process_id)  # starts new workers before the clock runs
        pool.run(2, hang_on_rank_0, seconds=1)
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
