"""Plans of temporal: what batches capture, how trainers are arranged, how fast they learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.layout_planner import (
    MIN_EVENTS_PER_TRAINER,
    CaptureCurve,
    LrSchedule,
    TrainerResources,
    choose_layout,
)
from gnnfleet.strategies.temporal.schedule import ParallelLayout


def test_a_batch_captures_enough() -> None:
    assert CaptureCurve(((100, 0.5), (200, 0.4), (300, 0.31), (400, 0.29))).batch == 300
    times = torch.arange(2000)
    nobody_twice = EventStream.from_arrays(times, times + 2000, times)
    assert CaptureCurve.of(nobody_twice).batch == 800  # there are two at least
    always_the_same = EventStream.from_arrays(times * 0, times * 0 + 1, times)
    assert CaptureCurve.of(always_the_same).batch == 100


MANY, OPEN = TrainerResources((8,), copy_bytes=10, memory_limit=1000), ParallelLayout(0, 0, 0)


def test_copies_are_preferred_to_lanes_and_pieces_are_large() -> None:
    assert choose_layout(MANY, 600, OPEN)[0] == ParallelLayout(1, 1, 8)
    assert choose_layout(MANY, 2 * MIN_EVENTS_PER_TRAINER, OPEN)[0] == ParallelLayout(2, 1, 4)
    assert choose_layout(TrainerResources((8,), 10, 20), 600, OPEN)[0] == ParallelLayout(1, 4, 2)
    assert choose_layout(MANY, 600, ParallelLayout(0, 4, 0))[0] == ParallelLayout(1, 4, 2)
    assert choose_layout(MANY, 600, ParallelLayout(8, 0, 0))[0] == ParallelLayout(8, 1, 1)
    assert choose_layout(TrainerResources((4, 4), 10, 10), 600, OPEN)[0] == ParallelLayout(1, 4, 2)
    assert choose_layout(TrainerResources((6, 4), 10, 60), 600, OPEN)[0] == ParallelLayout(1, 1, 10)
    assert choose_layout(TrainerResources((6, 4), 10, 30), 600, OPEN)[0] == ParallelLayout(1, 2, 5)
    text = choose_layout(TrainerResources((8,), 1 << 20, 2 << 20), 600, OPEN)[1]
    assert "1 × 4 × 2" in text and "room for 2" in text


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.integers(1, 40), st.integers(100, 4000))
def test_every_trainer_has_a_place_and_a_copy_one_machine(machines: list[int], held: int, batch: int) -> None:
    trainers = TrainerResources(tuple(machines), 1, held)
    try:
        shape, _ = choose_layout(trainers, batch, OPEN)
    except ConfigError:
        assert held < max(machines)
        return
    assert shape.workers == sum(machines)
    together = shape.batch_parallel * shape.epoch_parallel
    assert all(count % together == 0 and count // together <= held for count in machines)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.lanes=3 does not fit 8 workers"):
        choose_layout(MANY, 600, ParallelLayout(0, 3, 0))
    with pytest.raises(ConfigError, match="share one memory"):
        choose_layout(TrainerResources((2, 2), 10, 1000), 600, ParallelLayout(0, 4, 0))
    with pytest.raises(ConfigError, match="10 MiB each and 20 MiB are free"):
        choose_layout(TrainerResources((8,), 10 << 20, 20 << 20), 600, ParallelLayout(0, 1, 0))


def test_the_rate_grows_to_what_it_stays() -> None:
    pace = LrSchedule(0.1, factor=4.0, warmup=10)
    rates = [pace.at(iteration) for iteration in range(12)]
    assert rates[0] == 0.1 and rates == sorted(rates) and rates[10] == rates[11] == pytest.approx(0.4)
    assert LrSchedule(0.1).at(0) == LrSchedule(0.1).at(50) == 0.1
    falling = LrSchedule(0.1, decay=1.0, epoch=10.0)
    assert [falling.at(10 * epoch) for epoch in range(4)] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
