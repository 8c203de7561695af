"""Schedule of temporal as a table, without processes or tensors."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.comm.mesh import coordinates_of_rank
from gnnfleet.strategies.temporal.schedule import IterationPlan, ParallelLayout, Schedule

LAYOUTS = st.builds(
    ParallelLayout,
    batch_parallel=st.integers(1, 3),
    epoch_parallel=st.integers(1, 4),
    memory_parallel=st.integers(1, 4),
)
SCHEDULES = st.builds(Schedule, layout=LAYOUTS, batches=st.integers(1, 23))


def sweeps_of(schedule: Schedule, rank: int, count: int = 3) -> list[IterationPlan]:
    return [schedule.iteration_plan(rank, iteration) for iteration in range(count * schedule.sweep)]


@given(SCHEDULES)
def test_ranks_have_distinct_coordinates(schedule: Schedule) -> None:
    layout = schedule.layout
    coordinates = {tuple(coordinates_of_rank(rank, layout.axes).values()) for rank in range(layout.workers)}
    assert len(coordinates) == layout.workers


@given(SCHEDULES)
def test_a_sweep_uses_each_batch_once_per_pass_and_writes_it_once(schedule: Schedule) -> None:
    layout = schedule.layout
    for memory_copy in range(layout.memory_parallel):
        for offset in range(layout.batch_parallel):
            uses: Counter[tuple[int, int]] = Counter()
            kinds: set[tuple[int, int, int]] = set()
            writes: dict[int, list[int]] = {}
            for lane in range(layout.epoch_parallel):
                rank = (memory_copy * layout.epoch_parallel + lane) * layout.batch_parallel + offset
                for plan in sweeps_of(schedule, rank):
                    if plan.batch is None:
                        continue
                    uses[plan.sweep, plan.batch] += 1
                    kinds.add((plan.sweep, plan.batch, plan.use))
                    if plan.is_first:
                        writes.setdefault(plan.sweep, []).append(plan.phase)
                        assert plan.phase == plan.batch  # so writes are in the order of time, one per iteration
            for sweep in range(1 if schedule.initial_phase(memory_copy) else 0, 3):  # complete sweeps
                assert sorted(writes[sweep]) == list(range(schedule.batches))
                for batch in range(schedule.batches):
                    assert uses[sweep, batch] == layout.epoch_parallel
                    assert {use for s, b, use in kinds if (s, b) == (sweep, batch)} == set(range(layout.epoch_parallel))


@given(SCHEDULES)
def test_a_lane_uses_the_batch_it_read_in_consecutive_iterations(schedule: Schedule) -> None:
    for rank in range(schedule.layout.workers):
        current_batch: int | None = None
        last_use = -1
        for plan in sweeps_of(schedule, rank):
            if plan.is_first:
                current_batch, last_use = plan.batch, -1
            if plan.batch is not None:
                assert plan.batch == current_batch and plan.use == last_use + 1
                last_use = plan.use


@given(SCHEDULES)
def test_trainers_of_a_batch_have_one_plan_and_lanes_have_distinct_batches(schedule: Schedule) -> None:
    layout = schedule.layout
    for iteration in range(2 * schedule.sweep):
        plans = [schedule.iteration_plan(rank, iteration) for rank in range(layout.workers)]
        for first in range(0, layout.workers, layout.batch_parallel):
            assert len(set(plans[first : first + layout.batch_parallel])) == 1
        lane_plans = plans[:: layout.batch_parallel]
        busy = [(plan.memory_copy, plan.sweep, plan.batch) for plan in lane_plans if plan.batch is not None]
        assert len(set(busy)) == len(busy)
        for memory_copy in range(layout.memory_parallel):
            assert sum(plan.is_first for plan in lane_plans if plan.memory_copy == memory_copy) <= 1


@given(SCHEDULES)
def test_memory_copies_are_evenly_spaced_and_passes_have_distinct_numbers(schedule: Schedule) -> None:
    layout, apart = schedule.layout, schedule.sweep // schedule.layout.memory_parallel
    ranks = [
        memory_copy * layout.epoch_parallel * layout.batch_parallel for memory_copy in range(layout.memory_parallel)
    ]
    for iteration in range(2 * schedule.sweep):
        phases = [schedule.iteration_plan(rank, iteration).phase for rank in ranks]
        assert all(
            (phases[0] - phase) % schedule.sweep == memory_copy * apart for memory_copy, phase in enumerate(phases)
        )
    numbers = Counter(
        (plan.batch, plan.pass_number)
        for rank in range(0, layout.workers, layout.batch_parallel)
        for plan in sweeps_of(schedule, rank)
        if plan.batch is not None
    )
    assert set(numbers.values()) <= {1}


@given(SCHEDULES, st.integers(1, 12))
def test_epochs_are_contiguous_and_fill_sweeps(schedule: Schedule, epochs: int) -> None:
    starts = [schedule.start(epoch) for epoch in range(epochs + 1)]
    assert starts[0] == 0 and starts == sorted(starts)
    passes = schedule.layout.epoch_parallel * schedule.layout.memory_parallel
    assert schedule.start(epochs * passes) == epochs * schedule.sweep


def test_three_lanes_equal_the_documented_table() -> None:
    schedule = Schedule(ParallelLayout(epoch_parallel=3), 8)
    rows = []
    for lane in range(3):
        plans = [schedule.iteration_plan(lane, iteration) for iteration in range(schedule.sweep)]
        rows.append(" ".join("--" if t.batch is None else f"{t.batch}{'W' if t.is_first else t.use}" for t in plans))
    assert rows == [
        "0W 01 02 3W 31 32 6W 61 62 --",
        "-- 1W 11 12 4W 41 42 7W 71 72",
        "-- -- 2W 21 22 5W 51 52 -- --",
    ]


def test_one_trainer_follows_the_plain_loop() -> None:
    schedule = Schedule(ParallelLayout(), 5)
    for iteration in range(15):
        epoch, batch = divmod(iteration, 5)
        assert schedule.iteration_plan(0, iteration) == IterationPlan(0, epoch, batch, batch, 0, epoch)
        assert schedule.start(epoch) == 5 * epoch
