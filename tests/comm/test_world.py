"""Launch environments, the rendezvous of ranks in a store that was used before, and meshes over them."""

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


def test_the_launch_env_of_torchrun() -> None:
    env = LaunchEnv(rank=3, size=4, local_rank=1, host="a", port=29500, external_store=True, attempt=2, agent=True)
    assert LaunchEnv.from_environment(TORCHRUN) == env
    assert LaunchEnv.from_environment({}) is None
    assert LaunchEnv.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchEnv(rank=0, size=1, host="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "x"}, "RANK='x' is not a number from 0 on"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a number from 0 on"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_an_incomplete_launch_env_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchEnv.from_environment({**TORCHRUN, **changes})


def test_a_single_rank_is_a_world() -> None:
    with rendezvous(LaunchEnv(rank=0, size=1)) as joined, init_world(joined) as world:
        assert world.size == 1 and world.group is None and world.is_first and joined.on_one_machine
        assert world.subgroup("alone", [0]).size == 1


def start_ranks(port: int, *, attempts: tuple[int, ...]) -> list[dict[str, Any]]:
    """One process per entry of ``attempts``, which is the attempt that its launcher counts."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(len(attempts)), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.comm.report_rank"],
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


def test_ranks_of_a_later_attempt_meet_in_the_same_store() -> None:
    """Launchers on two machines count attempts independently, and keys of the first attempt are still there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set("hello/1", "a rank that died after this key")
    first, second = start_ranks(store.port, attempts=(0, 0, 0, 0)), start_ranks(store.port, attempts=(1, 0))
    for ranks in (first, second):
        assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
        assert len({rank["token"] for rank in ranks}) == 1 and len({tuple(rank["pids"]) for rank in ranks}) == 1
        assert all(rank["one machine"] and not rank["default group"] for rank in ranks)
        assert all(
            rank["all again"] == rank["all once more"] == rank["all"] for rank in ranks
        )  # two groups of one name
    assert [(rank["all"], rank["graph"], rank["stage"]) for rank in first] == [
        (6, 2, 1),
        (6, 4, 1),
        (6, 2, 5),
        (6, 4, 5),
    ]
    assert [(rank["all"], rank["graph"], rank["stage"]) for rank in second] == [(1, 1, 0), (1, 1, 1)]
    assert first[0]["token"] != second[0]["token"]


def test_missing_ranks_are_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    envs = [LaunchEnv(rank=rank, size=4, port=store.port, external_store=True) for rank in range(3)]
    errors: dict[int, str] = {}

    def wait(env: LaunchEnv) -> None:
        try:
            with rendezvous(env, seconds=0.5):
                pass
        except ExchangeError as error:
            errors[env.rank] = str(error)

    threads = [threading.Thread(target=wait, args=(env,)) for env in envs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "missing rank 3 of 4" in errors[0]
    assert all("for rank 0 and the others" in errors[rank] for rank in (1, 2))


def test_an_unreachable_store_is_named() -> None:
    with (
        pytest.raises(ExchangeError, match=r"cannot reach the store at 127\.0\.0\.1:1:"),
        rendezvous(LaunchEnv(rank=1, size=2, port=1, external_store=True), seconds=0.2),
    ):
        pass


def test_process_info_identifies_a_process() -> None:
    first, second = ProcessInfo.current(), ProcessInfo.current()
    assert first == second and first.pid == os.getpid() and first.born


AXES = st.dictionaries(
    st.sampled_from(["offset", "epoch", "memory", "graph"]), st.integers(1, 4), min_size=1, max_size=3
)


@given(AXES)
def test_coordinates_number_the_ranks(axes: dict[str, int]) -> None:
    size = prod(axes.values())
    coordinates = [coordinates_of_rank(rank, axes) for rank in range(size)]
    assert [rank_of_coordinates(position, axes) for position in coordinates] == list(range(size))
    assert len({tuple(position.values()) for position in coordinates}) == size
    assert (
        size < 2 or coordinates[1][[axis for axis, length in axes.items() if length > 1][-1]] == 1
    )  # the last runs fastest


@given(AXES)
def test_groups_along_an_axis_partition_the_ranks(axes: dict[str, int]) -> None:
    size = prod(axes.values())
    for axis, length in axes.items():
        groups = [ranks_along(rank, axis, axes) for rank in range(size)]
        assert all(rank in group and len(group) == length for rank, group in enumerate(groups))
        assert all(groups[member] == group for group in groups for member in group)
        assert all(
            coordinates_of_rank(member, axes)[axis] == position
            for group in groups
            for position, member in enumerate(group)
        )


def test_positions_in_a_mesh() -> None:
    from gnnfleet.comm.mesh import Mesh

    def mesh_of(rank: int) -> Mesh:
        world = World(rank, 6, new_group=lambda name, rank, size: None)  # type: ignore[arg-type, return-value]
        return Mesh(world, {"graph": 2, "stage": 3})

    assert mesh_of(4).coordinates == {"graph": 1, "stage": 1}
    assert (mesh_of(0).rank_at(stage=2), mesh_of(4).rank_at(graph=0), mesh_of(4).rank_at(graph=0, stage=2)) == (2, 1, 2)
    assert mesh_of(4).subgroup("graph").rank == 1 and mesh_of(4).subgroup("stage").size == 3
