"""Ring exchange: each rank receives the rows it needs, gradients return to their owners, bytes are the formula's."""

from __future__ import annotations

import gc
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.comm import shm_transport
from gnnfleet.comm.collectives import sum_over_ranks
from gnnfleet.comm.halo_exchange import ExchangePlan, ReturnPath, RingExchange, RowTable
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from tests.ranks import RankPool, with_shm_transport

ROWS = 9


def needed_rows(size: int, table: int) -> list[list[Tensor]]:
    """[p][q]: the rows of q that p needs. Some lists are empty, and one rank needs nothing."""
    random = torch.Generator().manual_seed(100 * size + table)
    lists = [[(torch.rand(ROWS, generator=random) < 0.4).nonzero()[:, 0] for _ in range(size)] for _ in range(size)]
    for p in range(size):
        lists[p][p] = lists[p][p][:0]
    if size > 2:
        lists[1] = [rows[:0] for rows in lists[1]]
    return lists


def plan_of(size: int, rank: int, table: int) -> ExchangePlan:
    lists = needed_rows(size, table)
    return ExchangePlan(tuple(lists[q][rank] for q in range(size)), tuple(len(rows) for rows in lists[rank]))


def rows_of(rank: int, table: int, width: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(10 * rank + table)
    return torch.randn(ROWS, width, generator=random).to(dtype)


TABLES = [(3, torch.float32), (2, torch.float64), (5, torch.bfloat16)]


class CountingAllocator:
    """An allocator that counts the bytes of its tensors in use, and their peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def __call__(self, shape: Any, dtype: torch.dtype) -> Tensor:
        import weakref

        tensor = torch.empty(*shape, dtype=dtype)
        self.live += tensor.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor.untyped_storage(), self._release, tensor.nbytes)
        return tensor

    def _release(self, nbytes: int) -> None:
        self.live -= nbytes


def fetch_and_return(world: World, group: int, depth: int, use_shm: bool = False) -> dict[str, Any]:
    world = with_shm_transport(world) if use_shm else world
    plans = [plan_of(world.size, world.rank, table) for table in range(len(TABLES))]
    tables = [rows_of(world.rank, table, *shape) for table, shape in enumerate(TABLES)]
    order, collected = [], []
    totals = [torch.zeros(ROWS, width + 1, dtype=torch.float64) for width, _ in TABLES[:2]]

    def use_rows(q: int, rows: list[Tensor]) -> list[Tensor]:
        order.append(q)
        for table, (width, dtype) in enumerate(TABLES):
            expected = rows_of(q, table, width, dtype)
            if q != world.rank:
                expected = expected[needed_rows(world.size, table)[world.rank][q]]
            assert torch.equal(rows[table], expected), (q, table)
        return [torch.nn.functional.pad(rows[table].double(), (0, 1), value=1.0) for table in range(2)]

    def collect(q: int, returned: list[Tensor]) -> None:
        collected.append(q)
        for table, rows in enumerate(returned):
            if q == world.rank:
                totals[table] += rows
            else:
                totals[table].index_add_(0, plans[table].send_rows[q], rows)

    allocator = CountingAllocator()
    row_tables = [RowTable(*plan_and_rows) for plan_and_rows in zip(plans, tables, strict=True)]
    return_paths = [ReturnPath(plans[table], TABLES[table][0] + 1, torch.float64) for table in range(2)]
    RingExchange(world, group, depth, allocator).run(row_tables, use_rows, returns=return_paths, on_returns=collect)
    return {
        "order": order,
        "collected": collected,
        "totals": totals,
        "bytes": world.traffic.bytes_sent,
        "rounds": world.traffic.rounds,
        "live": allocator.live,
    }


LAYOUTS = [layout for size in (1, 2, 3, 4) for layout in product([size], sorted({1, 2, size}), (0, 1, 2))]


@pytest.mark.parametrize("use_shm", [False, True])
@pytest.mark.parametrize(("size", "group", "depth"), LAYOUTS)
def test_rows_arrive_and_gradients_return_to_their_owners(
    pool: RankPool, size: int, group: int, depth: int, use_shm: bool
) -> None:
    reports = pool.run(size, fetch_and_return, group, depth, use_shm)
    for rank, report in enumerate(reports):
        assert report["order"] == [(rank - offset) % size for offset in range(size)]
        sources = [(rank + offset) % size for offset in range(size)]
        assert report["collected"] == [q for q in sources if q in report["collected"]], (
            "collected in the order of offsets"
        )
        expected_bytes = 0
        for table, (width, dtype) in enumerate(TABLES):
            lists = needed_rows(size, table)
            expected_bytes += sum(len(lists[p][rank]) for p in range(size)) * width * dtype.itemsize
            if table < 2:
                expected_bytes += sum(len(rows) for rows in lists[rank]) * (width + 1) * 8
                copies = torch.ones(ROWS, dtype=torch.float64)
                for p in range(size):
                    copies[lists[p][rank]] += 1
                rows = rows_of(rank, table, width, dtype).double() * copies[:, None]
                torch.testing.assert_close(report["totals"][table], torch.cat([rows, copies[:, None]], 1))
        assert report["bytes"] == expected_bytes
        assert report["rounds"] == (0 if size == 1 else -(-size // group))
        assert report["live"] == 0, "no buffer outlives its use"


def peak_remote_bytes(world: World, group: int, depth: int) -> int:
    rows = torch.zeros(64, 4)
    all_rows = torch.arange(64)
    peers = [q for q in range(world.size) if q != world.rank]
    plan = ExchangePlan(
        tuple(all_rows if q in peers else all_rows[:0] for q in range(world.size)),
        tuple(64 if q in peers else 0 for q in range(world.size)),
    )
    allocator = CountingAllocator()
    RingExchange(world, group, depth, allocator).run([RowTable(plan, rows)], lambda q, tables: None)
    return allocator.peak


@pytest.mark.parametrize(("group", "depth"), [(1, 0), (1, 1), (2, 1), (4, 1)])
def test_remote_rows_in_memory_are_bounded(pool: RankPool, group: int, depth: int) -> None:
    peak = max(pool.run(4, peak_remote_bytes, group, depth))
    block = 64 * 4 * 4
    # Outgoing messages need as much again.
    assert peak <= 2 * (1 + depth) * group * block
    assert peak <= 2 * 3 * block


def memory_files() -> int:
    gc.collect()
    return sum(
        "memfd:gnnfleet" in str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    )


def exchange_repeatedly(world: World, group: int, depth: int) -> dict[str, Any]:
    """Exchange messages of four sizes in turn; one rank reads late and returns views of the received rows."""
    before = memory_files()
    world = with_shm_transport(world)
    transport, are_equal = world.shm, []
    ring = RingExchange(world, group, depth)
    for number in range(12):
        count = [5, 900, 40, 3000][number % 4]
        all_rows = torch.arange(count)
        send_rows = tuple(all_rows[:0] if q == world.rank else all_rows for q in range(world.size))
        plan = ExchangePlan(send_rows, tuple(map(len, send_rows)))

        def use_rows(q: int, rows: list[Tensor], number: int = number) -> list[Tensor]:
            if world.rank == number % world.size:
                time.sleep(0.002)
            are_equal.append(bool((rows[0] == 100 * q + number).all()))
            return [rows[0]]

        def collect(q: int, rows: list[Tensor], number: int = number) -> None:
            are_equal.append(bool((rows[0] == 100 * world.rank + number).all()))

        rows = torch.full((count, 3), 100.0 * world.rank + number)
        ring.run([RowTable(plan, rows)], use_rows, returns=[ReturnPath(plan, 3, torch.float32)], on_returns=collect)
    slots, files = len(transport._slots), memory_files()
    transport.close(5.0)
    return {"equal": are_equal, "slots": slots, "max slots": ring.slots, "files": (before, files, memory_files())}


@pytest.mark.parametrize(("size", "group", "depth"), [(2, 1, 1), (3, 1, 0), (4, 2, 1), (4, 4, 1)])
def test_shared_memory_is_read_before_it_is_reused(pool: RankPool, size: int, group: int, depth: int) -> None:
    for report in pool.run(size, exchange_repeatedly, group, depth):
        assert len(report["equal"]) == 12 * 2 * size and all(report["equal"])
        assert 1 <= report["slots"] <= report["max slots"]
        before, during, after = report["files"]
        assert during > before == after, "no file stays open"


def test_a_slot_is_free_after_its_message_was_read_once() -> None:
    import os

    transport = shm_transport.ShmTransport(0, [os.getpid()], [os.getpid()])
    slot = transport.acquire(100, 0, max_slots=1, seconds=1.0)
    slot.rows(100).fill_(7)
    message = transport.open(transport.descriptor(slot, 100), 0)
    assert not slot.is_free and bool((message.data == 7).all())
    message.mark_read()
    assert slot.is_free and slot.is_free, "reading is_free does not change it"
    assert transport.acquire(50, 0, max_slots=1, seconds=1.0) is slot and not slot.is_free
    message.mark_read()
    transport.close(1.0)


def shm_peers(world: World, sandboxed: list[int], switched_off: list[int]) -> Any:
    """Peers that a rank exchanges shared memory with; sandboxed ranks have no memfd, others switched it off."""

    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    is_off = world.rank in switched_off
    peer_pids = [None if is_off or peer == world.rank else 7 for peer in range(world.size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_transport, "_can_map", lambda pid, fd, peer: True)
        if world.rank in sandboxed + switched_off:
            patch.setattr(shm_transport, "create_memory", refuse)
        transport = shm_transport.open_shm_transport(world.rank, peer_pids, lambda t: sum_over_ranks(world, t))
    return None if transport is None else (transport.pids, transport.readers)


@pytest.mark.parametrize(("sandboxed", "switched_off"), [([0, 1, 2], []), ([], [0, 1, 2]), ([1], []), ([], [1])])
def test_ranks_without_shared_memory_use_sockets(pool: RankPool, sandboxed: list[int], switched_off: list[int]) -> None:
    excluded = {*sandboxed, *switched_off}
    for rank, peers in enumerate(pool.run(3, shm_peers, sandboxed, switched_off)):
        expected = [7 if {rank, peer} & excluded == set() and peer != rank else None for peer in range(3)]
        assert peers == (None if rank in excluded else (expected, expected))


def fill_unread_slots(world: World) -> str:
    """Rank 0 fills slot after slot, and rank 1 reads none."""
    world = with_shm_transport(world)
    if world.rank == 1:
        return ""
    try:
        for _ in range(3):
            world.shm.acquire(100, 1, max_slots=2, seconds=0.3)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_peer_that_reads_no_rows_is_named(pool: RankPool) -> None:
    assert "rank 0 lost rank 1 (rows to be read)" in pool.run(2, fill_unread_slots)[0]


def exchange_large_rows(world: World, use_shm: bool) -> bool:
    """Exchange more rows than a socket buffers, in both directions at once."""
    world = with_shm_transport(world) if use_shm else world
    rows = torch.full((100_000, 64), float(world.rank))
    all_rows = torch.arange(100_000)
    send_rows = tuple(all_rows[:0] if q == world.rank else all_rows for q in range(world.size))
    are_equal = []

    def use_rows(q: int, tables: list[Tensor]) -> None:
        are_equal.append(bool((tables[0] == q).all()))

    RingExchange(world).run([RowTable(ExchangePlan(send_rows, tuple(map(len, send_rows))), rows)], use_rows)
    return all(are_equal) and len(are_equal) == world.size


@pytest.mark.parametrize("use_shm", [False, True])
def test_large_messages_do_not_block_each_other(pool: RankPool, use_shm: bool) -> None:
    assert pool.run(3, exchange_large_rows, use_shm) == [True] * 3


def wait_for_silent_peer(world: World) -> str:
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


def test_a_peer_that_does_not_answer_is_named(pool: RankPool) -> None:
    text = pool.run(2, wait_for_silent_peer)[0]
    pool.stop()  # gloo closed the connection
    assert "rank 0 lost rank 1 (receiving rows of aggregate)" in text
