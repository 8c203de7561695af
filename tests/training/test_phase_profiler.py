"""What workers tell: seconds of every epoch, bytes from one to the other; all ranks lines of one table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gnnfleet.comm.all_to_all import all_to_all_bytes
from gnnfleet.comm.clock_sync import clock_offset
from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import PHASES
from gnnfleet.training.phase_profiler import RankProfiler
from tests.ranks import Crew


class Kept:
    """A sink."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def close(self) -> None:
        return None


def letters(world: World, length: int) -> None:
    """Every rank sends to q ``length`` bytes times its own number + 1 and q + 1, with a head of 8."""
    size = [length * (world.rank + 1) * (peer + 1) for peer in range(world.size)]
    all_to_all_bytes(world, [torch.zeros(count, dtype=torch.uint8) for count in size], what="letters")


def telling(world: World) -> tuple[Any, ...]:
    strategy: Any = SimpleNamespace(elsewhere=())
    rows, totals = Kept(), []
    first = world.is_first
    meter = RankProfiler(
        world,
        world.uncounted(),
        strategy,
        rows if first else None,
        totals.append if first else None,
    )
    for epoch in (1, 2):
        meter.begin()
        letters(world, 10 * epoch)
        with meter.pause("evaluation"):
            letters(world, 1)
        meter.end(epoch)
    sum_over_ranks(world, torch.zeros(3, dtype=torch.float64))
    meter.report()
    meter.begin()
    meter.end(3)
    meter.report()
    return rows.rows, totals, world.traffic.bytes_sent, world.traffic.rounds


def test_the_first_rank_hears_of_all(crew: Crew) -> None:
    for size in (1, 3):
        found = crew.run(size, telling)
        rows, totals = found[0][:2]
        assert [row["epoch"] for row in rows] == [1, 2, 3], "every epoch once"
        assert all(len(row[phase]) == size and min(row[phase]) >= 0 for row in rows for phase in PHASES)
        last = totals[-1]
        assert [sum(row) for row in last["bytes"]] == [each[2] for each in found]
        assert last["rounds"] == [each[3] for each in found] and last["epoch"] == 3
        for p in range(size):
            for q in range(size):
                body = (10 + 20 + 2) * (p + 1) * (q + 1) + 4 * 8
                assert last["bytes"][p][q] == (body if p != q else 0)
            assert last["bytes"][p][size] == (24 if size > 1 else 0)
        assert all(not each[0] and not each[1] for each in found[1:])


def columns(world: World) -> dict[int, int]:
    grid = Mesh(world, {"way": 2, "stage": 2})
    letters(grid.subgroup("stage"), 1)
    letters(grid.subgroup("way"), 100)
    return dict(world.traffic.bytes_by_peer)


def test_parts_of_a_world_count_under_its_numbers(crew: Crew) -> None:
    """Rank way · 2 + stage: along a stage 0-1 and 2-3, along a way 0-2 and 1-3; numbers within a line are 0 and 1."""
    found = crew.run(4, columns)
    assert found == [
        {1: 8 + 2, 2: 8 + 200},
        {0: 8 + 2, 3: 8 + 200},
        {3: 8 + 2, 0: 8 + 200},
        {2: 8 + 2, 1: 8 + 200},
    ]


def test_clocks_of_one_machine_agree(crew: Crew) -> None:
    offsets = crew.run(3, clock_offset)
    assert offsets[0] == 0.0 and max(map(abs, offsets)) < 0.5, "processes of one machine share the monotonic clock"
