"""One rank of tests/comm/test_world.py: takes its seat from the environment and prints what it finds as JSON."""

from __future__ import annotations

import json
import sys

import torch

from gnnfleet.comm.launch_env import Seat
from gnnfleet.comm.mesh import Grid
from gnnfleet.comm.rendezvous import meet
from gnnfleet.comm.world import World, join


def total(world: World, value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    if world.group is not None:
        world.group.allreduce([found]).wait()
    return float(found)


def main() -> None:
    seat = Seat.from_environment()
    assert seat is not None
    with meet(seat, seconds=60) as meeting, join(meeting) as world:
        grid = Grid(world, {"way": 2, "stage": world.size // 2})
        found = {
            "rank": world.rank,
            "token": meeting.token,
            "one machine": meeting.on_one_machine,
            "pids": [member.pid for member in meeting.members],
            "all": total(world, world.rank),
            "way": total(grid.along("way"), world.rank),
            "stage": total(grid.along("stage"), world.rank),
            "again": total(world.among("all of them", range(world.size)), world.rank),
            "once more": total(world.among("all of them", range(world.size)), world.rank),
            "default group": torch.distributed.is_initialized(),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
