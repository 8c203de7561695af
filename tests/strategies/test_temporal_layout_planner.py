"""Planning of temporal: capture of batches, choice of the layout, learning rate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.temporal.layout_planner import (
    MIN_EVENTS_PER_TRAINER,
    CaptureCurve,
    LrSchedule,
    TrainerResources,
    choose_layout,
)
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from tests.graphs import event_stream


def test_the_largest_batch_that_captures_enough_is_chosen() -> None:
    assert CaptureCurve(((100, 0.5), (200, 0.4), (300, 0.31), (400, 0.29))).batch == 300
    times = torch.arange(2000)
    distinct_nodes = event_stream(times, times + 2000, times)
    assert CaptureCurve.of(distinct_nodes).batch == 800  # at least two batches
    one_pair = event_stream(times * 0, times * 0 + 1, times)
    assert CaptureCurve.of(one_pair).batch == 100


MANY, OPEN = TrainerResources((8,), copy_bytes=10, memory_limit=1000), ParallelLayout(0, 0, 0)


def test_memory_copies_are_preferred_to_lanes_and_shares_are_large() -> None:
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
def test_all_trainers_are_used_and_a_copy_is_on_one_machine(machines: list[int], max_copies: int, batch: int) -> None:
    resources = TrainerResources(tuple(machines), 1, max_copies)
    try:
        layout, _ = choose_layout(resources, batch, OPEN)
    except ConfigError:
        assert max_copies < max(machines)
        return
    assert layout.workers == sum(machines)
    trainers_of_copy = layout.batch_parallel * layout.epoch_parallel
    assert all(count % trainers_of_copy == 0 and count // trainers_of_copy <= max_copies for count in machines)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.epoch_parallel=3 does not fit 8 workers"):
        choose_layout(MANY, 600, ParallelLayout(0, 3, 0))
    with pytest.raises(ConfigError, match="share one memory"):
        choose_layout(TrainerResources((2, 2), 10, 1000), 600, ParallelLayout(0, 4, 0))
    with pytest.raises(ConfigError, match="takes 10 MiB, and a machine has 20 MiB for copies"):
        choose_layout(TrainerResources((8,), 10 << 20, 20 << 20), 600, ParallelLayout(0, 1, 0))


def test_the_learning_rate_warms_up_and_decays() -> None:
    schedule = LrSchedule(0.1, factor=4.0, warmup=10)
    rates = [schedule.at(iteration) for iteration in range(12)]
    assert rates[0] == 0.1 and rates == sorted(rates) and rates[10] == rates[11] == pytest.approx(0.4)
    assert LrSchedule(0.1).at(0) == LrSchedule(0.1).at(50) == 0.1
    falling = LrSchedule(0.1, decay=1.0, epoch=10.0)
    assert [falling.at(10 * epoch) for epoch in range(4)] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
