"""Phase times of every epoch and bytes between workers, gathered on the first rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gnnfleet.comm.all_to_all import all_to_all_bytes
from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.mesh import Mesh
from gnnfleet.comm.world import World
from gnnfleet.report.phase_timer import PHASES, PhaseTimer
from gnnfleet.training import phase_profiler
from gnnfleet.training.phase_profiler import PhaseProfiler
from gnnfleet.training.trace_files import clock_offset
from tests.ranks import RankPool


class RowList:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def close(self) -> None:
        return None


def send_messages(world: World, length: int) -> None:
    """Rank p sends ``length`` · (p + 1) · (q + 1) bytes to rank q, with a header of 8."""
    size = [length * (world.rank + 1) * (peer + 1) for peer in range(world.size)]
    all_to_all_bytes(world, [torch.zeros(count, dtype=torch.uint8) for count in size], op="messages")


def profile_epochs(world: World, external: int = 0) -> tuple[Any, ...]:
    workers = [{"compute": 1.0, "bytes_sent": 5.0, "rounds": 2.0} for _ in range(external)]
    rows, totals = RowList(), []
    first = world.is_first
    profiler = PhaseProfiler(world, workers, rows if first else None, totals.append if first else None)
    for epoch in (1, 2):
        profiler.begin()
        send_messages(world, 10 * epoch)
        with profiler.pause("evaluation"):
            send_messages(world, 1)
        profiler.end(epoch)
    sum_over_ranks(world, torch.zeros(3, dtype=torch.float64))
    profiler.report()
    profiler.begin()
    profiler.end(3)
    profiler.report()
    return rows.rows, totals, world.traffic.bytes_sent, world.traffic.rounds


def test_the_first_rank_gathers_epochs_and_totals(pool: RankPool) -> None:
    for size in (1, 3):
        by_rank = pool.run(size, profile_epochs)
        rows, totals = by_rank[0][:2]
        assert [row["epoch"] for row in rows] == [1, 2, 3], "every epoch once"
        assert all(len(row[phase]) == size and min(row[phase]) >= 0 for row in rows for phase in PHASES)
        last = totals[-1]
        assert [sum(row) for row in last["bytes"]] == [traffic[2] for traffic in by_rank]
        assert last["rounds"] == [traffic[3] for traffic in by_rank] and last["epoch"] == 3
        for p in range(size):
            for q in range(size):
                body = (10 + 20 + 2) * (p + 1) * (q + 1) + 4 * 8
                assert last["bytes"][p][q] == (body if p != q else 0)
            assert last["bytes"][p][size] == (24 if size > 1 else 0)
        assert all(not gathered[0] and not gathered[1] for gathered in by_rank[1:])


def test_external_workers_follow_the_rank_that_reports_them(pool: RankPool) -> None:
    rows, totals = pool.run(1, profile_epochs, 2)[0][:2]
    assert all(len(row[phase]) == 3 and row[phase][1:] == [0, 0] for row in rows for phase in PHASES)
    assert totals[-1]["bytes"][1:] == [[5, 0, 0, 0]] * 2 and totals[-1]["rounds"][1:] == [2, 2]


def test_further_phases_are_gathered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = (*PHASES, "io")
    monkeypatch.setattr(phase_profiler, "PHASES", phases)
    monkeypatch.setattr(PhaseTimer, "read", lambda _: dict.fromkeys(phases, 0.0))
    rows = profile_epochs(World(), external=1)[0]
    assert rows and all(set(row) == {"epoch", *phases} and row["io"] == [0, 0] for row in rows)


def columns(world: World) -> dict[int, int]:
    grid = Mesh(world, {"way": 2, "stage": 2})
    send_messages(grid.subgroup("stage"), 1)
    send_messages(grid.subgroup("way"), 100)
    return dict(world.traffic.bytes_by_peer)


def test_subgroups_count_traffic_by_global_rank(pool: RankPool) -> None:
    """Rank way · 2 + stage: subgroups of stages are 0-1 and 2-3, of ways 0-2 and 1-3; local ranks are 0 and 1."""
    assert pool.run(4, columns) == [
        {1: 8 + 2, 2: 8 + 200},
        {0: 8 + 2, 3: 8 + 200},
        {3: 8 + 2, 0: 8 + 200},
        {2: 8 + 2, 1: 8 + 200},
    ]


def test_clocks_of_one_machine_agree(pool: RankPool) -> None:
    offsets = pool.run(3, clock_offset)
    assert offsets[0] == 0.0 and max(map(abs, offsets)) < 0.5, "processes of one machine share the monotonic clock"
