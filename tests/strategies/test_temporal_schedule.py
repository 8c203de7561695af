"""The schedule of temporal as a table: no processes, no tensors."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.comm.mesh import coordinates_of
from gnnfleet.strategies.temporal.schedule import Schedule, Shape, Turn

SHAPES = st.builds(Shape, share=st.integers(1, 3), lanes=st.integers(1, 4), copies=st.integers(1, 4))
SCHEDULES = st.builds(Schedule, shape=SHAPES, batches=st.integers(1, 23))


def sweeps_of(schedule: Schedule, rank: int, count: int = 3) -> list[Turn]:
    return [schedule.turn(rank, iteration) for iteration in range(count * schedule.sweep)]


@given(SCHEDULES)
def test_places_of_ranks_differ(schedule: Schedule) -> None:
    shape = schedule.shape
    places = {tuple(coordinates_of(rank, shape.axes).values()) for rank in range(shape.workers)}
    assert len(places) == shape.workers


@given(SCHEDULES)
def test_a_sweep_uses_every_batch_once_a_lane_and_writes_it_once(schedule: Schedule) -> None:
    shape = schedule.shape
    for copy in range(shape.copies):
        for offset in range(shape.share):
            uses: Counter[tuple[int, int]] = Counter()
            kinds: set[tuple[int, int, int]] = set()
            writes: dict[int, list[int]] = {}
            for lane in range(shape.lanes):
                rank = (copy * shape.lanes + lane) * shape.share + offset
                for turn in sweeps_of(schedule, rank):
                    if turn.batch is None:
                        continue
                    uses[turn.sweep, turn.batch] += 1
                    kinds.add((turn.sweep, turn.batch, turn.use))
                    if turn.is_first:
                        writes.setdefault(turn.sweep, []).append(turn.phase)
                        assert turn.phase == turn.batch  # so writes are in the order of time, one an iteration
            for sweep in range(1 if schedule.begin_of(copy) else 0, 3):  # whole ones
                assert sorted(writes[sweep]) == list(range(schedule.batches))
                for batch in range(schedule.batches):
                    assert uses[sweep, batch] == shape.lanes
                    assert {use for s, b, use in kinds if (s, b) == (sweep, batch)} == set(range(shape.lanes))


@given(SCHEDULES)
def test_a_batch_is_used_in_a_row_by_the_lane_that_read_it(schedule: Schedule) -> None:
    for rank in range(schedule.shape.workers):
        held: int | None = None
        before = -1
        for turn in sweeps_of(schedule, rank):
            if turn.is_first:
                held, before = turn.batch, -1
            if turn.batch is not None:
                assert turn.batch == held and turn.use == before + 1
                before = turn.use


@given(SCHEDULES)
def test_trainers_of_a_batch_do_the_same_and_lanes_never_meet(schedule: Schedule) -> None:
    shape = schedule.shape
    for iteration in range(2 * schedule.sweep):
        turns = [schedule.turn(rank, iteration) for rank in range(shape.workers)]
        for first in range(0, shape.workers, shape.share):
            assert len(set(turns[first : first + shape.share])) == 1
        each = turns[:: shape.share]
        busy = [(turn.copy, turn.sweep, turn.batch) for turn in each if turn.batch is not None]
        assert len(set(busy)) == len(busy)
        for copy in range(shape.copies):
            assert sum(turn.is_first for turn in each if turn.copy == copy) <= 1


@given(SCHEDULES)
def test_copies_walk_evenly_apart_and_passes_are_numbered_apart(schedule: Schedule) -> None:
    shape, apart = schedule.shape, schedule.sweep // schedule.shape.copies
    ranks = [copy * shape.lanes * shape.share for copy in range(shape.copies)]
    for iteration in range(2 * schedule.sweep):
        phases = [schedule.turn(rank, iteration).phase for rank in ranks]
        assert all((phases[0] - phase) % schedule.sweep == copy * apart for copy, phase in enumerate(phases))
    numbers = Counter(
        (turn.batch, turn.number)
        for rank in range(0, shape.workers, shape.share)
        for turn in sweeps_of(schedule, rank)
        if turn.batch is not None
    )
    assert set(numbers.values()) <= {1}


@given(SCHEDULES, st.integers(1, 12))
def test_epochs_follow_each_other_and_fill_sweeps(schedule: Schedule, epochs: int) -> None:
    starts = [schedule.start(epoch) for epoch in range(epochs + 1)]
    assert starts[0] == 0 and starts == sorted(starts)
    passes = schedule.shape.lanes * schedule.shape.copies
    assert schedule.start(epochs * passes) == epochs * schedule.sweep


def test_three_lanes_as_drawn() -> None:
    schedule = Schedule(Shape(lanes=3), 8)
    rows = []
    for lane in range(3):
        turns = [schedule.turn(lane, iteration) for iteration in range(schedule.sweep)]
        rows.append(" ".join("--" if t.batch is None else f"{t.batch}{'W' if t.is_first else t.use}" for t in turns))
    assert rows == [
        "0W 01 02 3W 31 32 6W 61 62 --",
        "-- 1W 11 12 4W 41 42 7W 71 72",
        "-- -- 2W 21 22 5W 51 52 -- --",
    ]


def test_one_trainer_is_the_plain_loop() -> None:
    schedule = Schedule(Shape(), 5)
    for iteration in range(15):
        epoch, batch = divmod(iteration, 5)
        assert schedule.turn(0, iteration) == Turn(0, epoch, batch, batch, 0, epoch)
        assert schedule.start(epoch) == 5 * epoch
