"""Seats from the environment; ranks that meet, in a store with the keys of an attempt before; grids over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.mesh import coordinates_of_rank, rank_of_coordinates, ranks_along
from gnnfleet.comm.rendezvous import ProcessInfo, rendezvous
from gnnfleet.comm.world import World, init_world
from gnnfleet.errors import ConfigError, ExchangeError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_seat_is_what_torchrun_says() -> None:
    seat = LaunchEnv(rank=3, size=4, local_rank=1, host="a", port=29500, external_store=True, attempt=2, agent=True)
    assert LaunchEnv.from_environment(TORCHRUN) == seat
    assert LaunchEnv.from_environment({}) is None
    assert LaunchEnv.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchEnv(rank=0, size=1, host="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "below WORLD_SIZE=4, found 4"),
        ({"RANK": "x"}, "RANK is a number from 0, found 'x'"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_half_a_seat_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchEnv.from_environment({**TORCHRUN, **changes})


def test_one_rank_meets_itself() -> None:
    with rendezvous(LaunchEnv(rank=0, size=1)) as meeting, init_world(meeting) as world:
        assert world.size == 1 and world.group is None and world.is_first and meeting.on_one_machine
        assert world.subgroup("alone", [0]).size == 1


def sit(port: int, *, attempts: tuple[int, ...]) -> list[dict[str, Any]]:
    """One process per entry of ``attempts``, which is what its launcher says its attempt is."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(len(attempts)), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.comm.sitting"],
            env={**common, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
        )
        for rank, attempt in enumerate(attempts)
    ]
    try:
        return [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_ranks_meet_again_in_a_used_store() -> None:
    """Launchers on two machines count attempts apart, and the keys of the first attempt are still there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set("hello/1", "a rank that died after this word")
    first, second = sit(store.port, attempts=(0, 0, 0, 0)), sit(store.port, attempts=(1, 0))
    for found in (first, second):
        assert [one["rank"] for one in found] == list(range(len(found)))
        assert len({one["token"] for one in found}) == 1 and len({tuple(one["pids"]) for one in found}) == 1
        assert all(one["one machine"] and not one["default group"] for one in found)
        assert all(one["again"] == one["once more"] == one["all"] for one in found)  # two groups of one name
    assert [(one["all"], one["way"], one["stage"]) for one in first] == [(6, 2, 1), (6, 4, 1), (6, 2, 5), (6, 4, 5)]
    assert [(one["all"], one["way"], one["stage"]) for one in second] == [(1, 1, 0), (1, 1, 1)]
    assert first[0]["token"] != second[0]["token"]


def test_who_is_missing_is_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    seats = [LaunchEnv(rank=rank, size=4, port=store.port, external_store=True) for rank in range(3)]
    found: dict[int, str] = {}

    def wait(seat: LaunchEnv) -> None:
        try:
            with rendezvous(seat, seconds=0.5):
                pass
        except ExchangeError as error:
            found[seat.rank] = str(error)

    threads = [threading.Thread(target=wait, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "missing: rank 3." in found[0]
    assert all("for rank 0 and the others" in found[rank] for rank in (1, 2))


def test_no_store_is_an_error_that_says_where() -> None:
    with (
        pytest.raises(ExchangeError, match=r"cannot reach the store at 127\.0\.0\.1:1:"),
        rendezvous(LaunchEnv(rank=1, size=2, port=1, external_store=True), seconds=0.2),
    ):
        pass


def test_a_process_is_known_from_a_later_one() -> None:
    one, two = ProcessInfo.current(), ProcessInfo.current()
    assert one == two and one.pid == os.getpid() and one.born


AXES = st.dictionaries(st.sampled_from(["offset", "lane", "copy", "way"]), st.integers(1, 4), min_size=1, max_size=3)


@given(AXES)
def test_coordinates_number_the_ranks(axes: dict[str, int]) -> None:
    size = prod(axes.values())
    found = [coordinates_of_rank(rank, axes) for rank in range(size)]
    assert [rank_of_coordinates(places, axes) for places in found] == list(range(size))
    assert len({tuple(places.values()) for places in found}) == size
    assert size < 2 or found[1][[axis for axis, length in axes.items() if length > 1][-1]] == 1  # the last runs fastest


@given(AXES)
def test_the_lines_of_an_axis_cut_the_ranks(axes: dict[str, int]) -> None:
    size = prod(axes.values())
    for axis, length in axes.items():
        lines = [ranks_along(rank, axis, axes) for rank in range(size)]
        assert all(rank in line and len(line) == length for rank, line in enumerate(lines))
        assert all(lines[member] == line for line in lines for member in line)
        assert all(
            coordinates_of_rank(member, axes)[axis] == place for line in lines for place, member in enumerate(line)
        )


def test_places_in_a_grid() -> None:
    from gnnfleet.comm.mesh import Mesh

    def at(rank: int) -> Mesh:
        world = World(rank, 6, new_group=lambda name, rank, size: None)  # type: ignore[arg-type, return-value]
        return Mesh(world, {"way": 2, "stage": 3})

    assert at(4).coordinates == {"way": 1, "stage": 1}
    assert (at(0).rank_at(stage=2), at(4).rank_at(way=0), at(4).rank_at(way=0, stage=2)) == (2, 1, 2)
    assert at(4).subgroup("way").rank == 1 and at(4).subgroup("stage").size == 3
