"""The schedule of temporal as a table: no processes, no tensors."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.comm.mesh import coordinates_of_rank
from gnnfleet.strategies.temporal.schedule import IterationPlan, ParallelLayout, Schedule

SHAPES = st.builds(
    ParallelLayout,
    batch_parallel=st.integers(1, 3),
    epoch_parallel=st.integers(1, 4),
    memory_parallel=st.integers(1, 4),
)
SCHEDULES = st.builds(Schedule, layout=SHAPES, batches=st.integers(1, 23))


def sweeps_of(schedule: Schedule, rank: int, count: int = 3) -> list[IterationPlan]:
    return [schedule.iteration_plan(rank, iteration) for iteration in range(count * schedule.sweep)]


@given(SCHEDULES)
def test_places_of_ranks_differ(schedule: Schedule) -> None:
    shape = schedule.layout
    places = {tuple(coordinates_of_rank(rank, shape.axes).values()) for rank in range(shape.workers)}
    assert len(places) == shape.workers


@given(SCHEDULES)
def test_a_sweep_uses_every_batch_once_a_lane_and_writes_it_once(schedule: Schedule) -> None:
    shape = schedule.layout
    for copy in range(shape.memory_parallel):
        for offset in range(shape.batch_parallel):
            uses: Counter[tuple[int, int]] = Counter()
            kinds: set[tuple[int, int, int]] = set()
            writes: dict[int, list[int]] = {}
            for lane in range(shape.epoch_parallel):
                rank = (copy * shape.epoch_parallel + lane) * shape.batch_parallel + offset
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
                    assert uses[sweep, batch] == shape.epoch_parallel
                    assert {use for s, b, use in kinds if (s, b) == (sweep, batch)} == set(range(shape.epoch_parallel))


@given(SCHEDULES)
def test_a_batch_is_used_in_a_row_by_the_lane_that_read_it(schedule: Schedule) -> None:
    for rank in range(schedule.layout.workers):
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
    shape = schedule.layout
    for iteration in range(2 * schedule.sweep):
        turns = [schedule.iteration_plan(rank, iteration) for rank in range(shape.workers)]
        for first in range(0, shape.workers, shape.batch_parallel):
            assert len(set(turns[first : first + shape.batch_parallel])) == 1
        each = turns[:: shape.batch_parallel]
        busy = [(turn.memory_copy, turn.sweep, turn.batch) for turn in each if turn.batch is not None]
        assert len(set(busy)) == len(busy)
        for copy in range(shape.memory_parallel):
            assert sum(turn.is_first for turn in each if turn.memory_copy == copy) <= 1


@given(SCHEDULES)
def test_copies_walk_evenly_apart_and_passes_are_numbered_apart(schedule: Schedule) -> None:
    shape, apart = schedule.layout, schedule.sweep // schedule.layout.memory_parallel
    ranks = [copy * shape.epoch_parallel * shape.batch_parallel for copy in range(shape.memory_parallel)]
    for iteration in range(2 * schedule.sweep):
        phases = [schedule.iteration_plan(rank, iteration).phase for rank in ranks]
        assert all((phases[0] - phase) % schedule.sweep == copy * apart for copy, phase in enumerate(phases))
    numbers = Counter(
        (turn.batch, turn.number)
        for rank in range(0, shape.workers, shape.batch_parallel)
        for turn in sweeps_of(schedule, rank)
        if turn.batch is not None
    )
    assert set(numbers.values()) <= {1}


@given(SCHEDULES, st.integers(1, 12))
def test_epochs_follow_each_other_and_fill_sweeps(schedule: Schedule, epochs: int) -> None:
    starts = [schedule.start(epoch) for epoch in range(epochs + 1)]
    assert starts[0] == 0 and starts == sorted(starts)
    passes = schedule.layout.epoch_parallel * schedule.layout.memory_parallel
    assert schedule.start(epochs * passes) == epochs * schedule.sweep


def test_three_lanes_as_drawn() -> None:
    schedule = Schedule(ParallelLayout(epoch_parallel=3), 8)
    rows = []
    for lane in range(3):
        turns = [schedule.iteration_plan(lane, iteration) for iteration in range(schedule.sweep)]
        rows.append(" ".join("--" if t.batch is None else f"{t.batch}{'W' if t.is_first else t.use}" for t in turns))
    assert rows == [
        "0W 01 02 3W 31 32 6W 61 62 --",
        "-- 1W 11 12 4W 41 42 7W 71 72",
        "-- -- 2W 21 22 5W 51 52 -- --",
    ]


def test_one_trainer_is_the_plain_loop() -> None:
    schedule = Schedule(ParallelLayout(), 5)
    for iteration in range(15):
        epoch, batch = divmod(iteration, 5)
        assert schedule.iteration_plan(0, iteration) == IterationPlan(0, epoch, batch, batch, 0, epoch)
        assert schedule.start(epoch) == 5 * epoch
