"""One rank of tests/comm/test_world.py: takes its seat from the environment and prints what it finds as JSON."""

from __future__ import annotations

import json
import sys

import torch

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.rendezvous import rendezvous
from gnnfleet.comm.world import World, init_world


def total(world: World, value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    if world.group is not None:
        world.group.allreduce([found]).wait()
    return float(found)


def main() -> None:
    seat = LaunchEnv.from_environment()
    assert seat is not None
    with rendezvous(seat, seconds=60) as meeting, init_world(meeting) as world:
        grid = Mesh(world, {"way": 2, "stage": world.size // 2})
        found = {
            "rank": world.rank,
            "token": meeting.token,
            "one machine": meeting.on_one_machine,
            "pids": [member.pid for member in meeting.members],
            "all": total(world, world.rank),
            "way": total(grid.subgroup("way"), world.rank),
            "stage": total(grid.subgroup("stage"), world.rank),
            "again": total(world.subgroup("all of them", range(world.size)), world.rank),
            "once more": total(world.subgroup("all of them", range(world.size)), world.rank),
            "default group": torch.distributed.is_initialized(),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
