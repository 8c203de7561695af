"""Rows that move: every rank sees exactly the rows it asked for, what it returns goes home, bytes are the formula's."""

from __future__ import annotations

import gc
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm import shm_transport as shelves
from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath, RingExchange, RowTable
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from tests.ranks import Crew, with_shelf

ROWS = 9


def wanted(size: int, lane: int) -> list[list[Tensor]]:
    """[p][q]: the rows of q that p needs, the same on all ranks; some lists are empty, one rank needs nothing."""
    random = torch.Generator().manual_seed(100 * size + lane)
    lists = [[(torch.rand(ROWS, generator=random) < 0.4).nonzero()[:, 0] for _ in range(size)] for _ in range(size)]
    for p in range(size):
        lists[p][p] = lists[p][p][:0]
    if size > 2:
        lists[1] = [rows[:0] for rows in lists[1]]
    return lists


def routes_of(size: int, rank: int, lane: int) -> ExchangePlan:
    lists = wanted(size, lane)
    return ExchangePlan(tuple(lists[q][rank] for q in range(size)), tuple(len(rows) for rows in lists[rank]))


def table(rank: int, lane: int, width: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(10 * rank + lane)
    return torch.randn(ROWS, width, generator=random).to(dtype)


FORMS = [(3, torch.float32), (2, torch.float64), (5, torch.bfloat16)]


class Seen:
    """An allocator that knows how much of what it gave is still in use."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def __call__(self, shape: Any, dtype: torch.dtype) -> Tensor:
        import weakref

        made = torch.empty(*shape, dtype=dtype)
        self.live += made.nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(made.untyped_storage(), self._gone, made.nbytes)
        return made

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


def fetch_and_return(world: World, group: int, depth: int, shelf: bool = False) -> dict[str, Any]:
    world = with_shelf(world) if shelf else world
    routes = [routes_of(world.size, world.rank, lane) for lane in range(len(FORMS))]
    tables = [table(world.rank, lane, *form) for lane, form in enumerate(FORMS)]
    order, collected = [], []
    totals = [torch.zeros(ROWS, width + 1, dtype=torch.float64) for width, _ in FORMS[:2]]

    def visit(q: int, rows: list[Tensor]) -> list[Tensor]:
        order.append(q)
        for lane, (width, dtype) in enumerate(FORMS):
            expected = table(q, lane, width, dtype)
            if q != world.rank:
                expected = expected[wanted(world.size, lane)[world.rank][q]]
            assert torch.equal(rows[lane], expected), (q, lane)
        return [torch.nn.functional.pad(rows[lane].double(), (0, 1), value=1.0) for lane in range(2)]

    def collect(q: int, back: list[Tensor]) -> None:
        collected.append(q)
        for lane, rows in enumerate(back):
            if q == world.rank:
                totals[lane] += rows
            else:
                totals[lane].index_add_(0, routes[lane].send_rows[q], rows)

    seen = Seen()
    lanes = [RowTable(*both) for both in zip(routes, tables, strict=True)]
    home = [ReturnPath(routes[lane], FORMS[lane][0] + 1, torch.float64) for lane in range(2)]
    RingExchange(world, group, depth, seen).run(lanes, visit, returns=home, on_returns=collect)
    return {
        "order": order,
        "collected": collected,
        "totals": totals,
        "bytes": world.traffic.bytes_sent,
        "rounds": world.traffic.rounds,
        "live": seen.live,
    }


WAYS = [way for size in (1, 2, 3, 4) for way in product([size], sorted({1, 2, size}), (0, 1, 2))]


@pytest.mark.parametrize("shelf", [False, True])
@pytest.mark.parametrize(("size", "group", "depth"), WAYS)
def test_rows_arrive_and_gradients_go_home(crew: Crew, size: int, group: int, depth: int, shelf: bool) -> None:
    found = crew.run(size, fetch_and_return, group, depth, shelf)
    for rank, one in enumerate(found):
        assert one["order"] == [(rank - offset) % size for offset in range(size)]
        came = [(rank + offset) % size for offset in range(size)]
        assert one["collected"] == [q for q in came if q in one["collected"]], "collected in the order of offsets"
        expected_bytes = 0
        for lane, (width, dtype) in enumerate(FORMS):
            lists = wanted(size, lane)
            expected_bytes += sum(len(lists[p][rank]) for p in range(size)) * width * dtype.itemsize
            if lane < 2:
                expected_bytes += sum(len(rows) for rows in lists[rank]) * (width + 1) * 8
                times = torch.ones(ROWS, dtype=torch.float64)
                for p in range(size):
                    times[lists[p][rank]] += 1
                rows = table(rank, lane, width, dtype).double() * times[:, None]
                torch.testing.assert_close(one["totals"][lane], torch.cat([rows, times[:, None]], 1))
        assert one["bytes"] == expected_bytes
        assert one["rounds"] == (0 if size == 1 else -(-size // group))
        assert one["live"] == 0, "no buffer outlives the visit"


def resident(world: World, group: int, depth: int) -> int:
    rows = torch.zeros(64, 4)
    every = torch.arange(64)
    others = [q for q in range(world.size) if q != world.rank]
    routes = ExchangePlan(
        tuple(every if q in others else every[:0] for q in range(world.size)),
        tuple(64 if q in others else 0 for q in range(world.size)),
    )
    seen = Seen()
    RingExchange(world, group, depth, seen).run([RowTable(routes, rows)], lambda q, found: None)
    return seen.most


@pytest.mark.parametrize(("group", "depth"), [(1, 0), (1, 1), (2, 1), (4, 1)])
def test_remote_rows_in_memory_are_bounded(crew: Crew, group: int, depth: int) -> None:
    most = max(crew.run(4, resident, group, depth))
    block = 64 * 4 * 4
    # As much again is on its way out.
    assert most <= 2 * (1 + depth) * group * block
    assert most <= 2 * 3 * block


def memory_files() -> int:
    gc.collect()
    return sum(
        "memfd:gnnfleet" in str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    )


def many_tours(world: World, group: int, depth: int) -> dict[str, Any]:
    """Messages of all sizes in turn, read late by one rank; what comes back is a view of what arrived."""
    before = memory_files()
    world = with_shelf(world)
    shelf, right = world.shm, []
    ring = RingExchange(world, group, depth)
    for tour in range(12):
        count = [5, 900, 40, 3000][tour % 4]
        every = torch.arange(count)
        lists = tuple(every[:0] if q == world.rank else every for q in range(world.size))
        routes = ExchangePlan(lists, tuple(map(len, lists)))

        def visit(q: int, rows: list[Tensor], tour: int = tour) -> list[Tensor]:
            if world.rank == tour % world.size:
                time.sleep(0.002)
            right.append(bool((rows[0] == 100 * q + tour).all()))
            return [rows[0]]

        def collect(q: int, rows: list[Tensor], tour: int = tour) -> None:
            right.append(bool((rows[0] == 100 * world.rank + tour).all()))

        table = torch.full((count, 3), 100.0 * world.rank + tour)
        ring.run([RowTable(routes, table)], visit, returns=[ReturnPath(routes, 3, torch.float32)], on_returns=collect)
    slots, files = len(shelf._slots), memory_files()
    shelf.close(5.0)
    return {"right": right, "slots": slots, "most": ring.slots, "files": (before, files, memory_files())}


@pytest.mark.parametrize(("size", "group", "depth"), [(2, 1, 1), (3, 1, 0), (4, 2, 1), (4, 4, 1)])
def test_shared_memory_is_read_before_it_is_filled_again(crew: Crew, size: int, group: int, depth: int) -> None:
    for found in crew.run(size, many_tours, group, depth):
        assert len(found["right"]) == 12 * 2 * size and all(found["right"])
        assert 1 <= found["slots"] <= found["most"]
        before, during, after = found["files"]
        assert during > before == after, "nothing stays open"


def test_a_slot_is_free_after_its_message_was_read_once() -> None:
    import os

    transport = shelves.ShmTransport(0, [os.getpid()], [os.getpid()])
    slot = transport.acquire(100, 0, max_slots=1, seconds=1.0)
    slot.rows(100).fill_(7)
    message = transport.open(transport.descriptor(slot, 100), 0)
    assert not slot.is_free and bool((message.data == 7).all())
    message.mark_read()
    assert slot.is_free and slot.is_free, "asking does not change the answer"
    assert transport.acquire(50, 0, max_slots=1, seconds=1.0) is slot and not slot.is_free
    message.mark_read()
    transport.close(1.0)


def forbidden(world: World, sandboxed: list[int], switched_off: list[int]) -> Any:
    """Whom each rank reads and is read by, where some have no memfd and some were told not to use it."""

    def none(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    off = world.rank in switched_off
    others = [None if off or peer == world.rank else 7 for peer in range(world.size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelves, "_can_map", lambda pid, fd, peer: True)
        if world.rank in sandboxed + switched_off:
            patch.setattr(shelves, "create_memory", none)
        found = shelves.open_shm_transport(world.rank, others, lambda t: sum_over_ranks(world, t))
    return None if found is None else (found.pids, found.readers)


@pytest.mark.parametrize(("sandboxed", "switched_off"), [([0, 1, 2], []), ([], [0, 1, 2]), ([1], []), ([], [1])])
def test_ranks_without_shared_memory_talk_through_sockets(
    crew: Crew, sandboxed: list[int], switched_off: list[int]
) -> None:
    found, out = crew.run(3, forbidden, sandboxed, switched_off), {*sandboxed, *switched_off}
    for rank, shares in enumerate(found):
        with_whom = [7 if {rank, peer} & out == set() and peer != rank else None for peer in range(3)]
        assert shares == (None if rank in out else (with_whom, with_whom))


def unread(world: World) -> str:
    """Rank 0 fills slot after slot, and nobody reads."""
    world = with_shelf(world)
    if world.rank == 1:
        return ""
    try:
        for _ in range(3):
            world.shm.acquire(100, 1, max_slots=2, seconds=0.3)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_rows_that_nobody_reads(crew: Crew) -> None:
    assert "rank 0 lost rank 1 (rows to be read)" in crew.run(2, unread)[0]


def large(world: World, shelf: bool) -> bool:
    """More than any socket holds, both directions at once."""
    world = with_shelf(world) if shelf else world
    rows = torch.full((100_000, 64), float(world.rank))
    every = torch.arange(100_000)
    lists = tuple(every[:0] if q == world.rank else every for q in range(world.size))
    right = []

    def visit(q: int, found: list[Tensor]) -> None:
        right.append(bool((found[0] == q).all()))

    RingExchange(world).run([RowTable(ExchangePlan(lists, tuple(map(len, lists))), rows)], visit)
    return all(right) and len(right) == world.size


@pytest.mark.parametrize("shelf", [False, True])
def test_large_messages_do_not_block_each_other(crew: Crew, shelf: bool) -> None:
    assert crew.run(3, large, shelf) == [True] * 3


def lonely(world: World) -> str:
    """Rank 0 waits for rows that rank 1 never sends."""
    from dataclasses import replace

    if world.rank == 1:
        return ""
    routes = ExchangePlan((torch.arange(0), torch.arange(0)), (0, 4))
    try:
        RingExchange(replace(world, timeout=0.5)).run(
            [RowTable(routes, torch.zeros(4, 2))], lambda q, rows: None, op="rows of aggregate"
        )
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_peer_that_does_not_answer_is_named(crew: Crew) -> None:
    text = crew.run(2, lonely)[0]
    crew.stop()  # gloo closed the connection
    assert "rank 0 lost rank 1 (receiving rows of aggregate)" in text
