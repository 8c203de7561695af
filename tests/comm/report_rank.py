"""One rank of tests/comm/test_world.py: joins the World of its launch environment and prints a report as JSON."""

from __future__ import annotations

import json
import sys

import torch

from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.rendezvous import rendezvous
from gnnfleet.comm.world import World, init_world


def sum_of(world: World, value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    if world.group is not None:
        world.group.allreduce([total]).wait()
    return float(total)


def main() -> None:
    env = LaunchEnv.from_environment()
    assert env is not None
    with rendezvous(env, seconds=60) as joined, init_world(joined) as world:
        mesh = Mesh(world, {"graph": 2, "stage": world.size // 2})
        report = {
            "rank": world.rank,
            "token": joined.token,
            "one machine": joined.on_one_machine,
            "pids": [member.pid for member in joined.members],
            "all": sum_of(world, world.rank),
            "graph": sum_of(mesh.subgroup("graph"), world.rank),
            "stage": sum_of(mesh.subgroup("stage"), world.rank),
            "all again": sum_of(world.subgroup("all ranks", range(world.size)), world.rank),
            "all once more": sum_of(world.subgroup("all ranks", range(world.size)), world.rank),
            "default group": torch.distributed.is_initialized(),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
