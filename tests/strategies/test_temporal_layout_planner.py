"""Plans of temporal: what batches capture, how trainers are arranged, how fast they learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.strategies.temporal.layout_planner import LEAST_PIECE, Curve, Pace, Trainers, arrange
from gnnfleet.strategies.temporal.schedule import Shape


def test_a_batch_captures_enough() -> None:
    assert Curve(((100, 0.5), (200, 0.4), (300, 0.31), (400, 0.29))).batch == 300
    times = torch.arange(2000)
    nobody_twice = EventStream.from_arrays(times, times + 2000, times)
    assert Curve.of(nobody_twice).batch == 800  # there are two at least
    always_the_same = EventStream.from_arrays(times * 0, times * 0 + 1, times)
    assert Curve.of(always_the_same).batch == 100


MANY, OPEN = Trainers((8,), copy_bytes=10, room=1000), Shape(0, 0, 0)


def test_copies_are_preferred_to_lanes_and_pieces_are_large() -> None:
    assert arrange(MANY, 600, OPEN)[0] == Shape(1, 1, 8)
    assert arrange(MANY, 2 * LEAST_PIECE, OPEN)[0] == Shape(2, 1, 4)
    assert arrange(Trainers((8,), 10, 20), 600, OPEN)[0] == Shape(1, 4, 2)
    assert arrange(MANY, 600, Shape(0, 4, 0))[0] == Shape(1, 4, 2)
    assert arrange(MANY, 600, Shape(8, 0, 0))[0] == Shape(8, 1, 1)
    assert arrange(Trainers((4, 4), 10, 10), 600, OPEN)[0] == Shape(1, 4, 2)
    assert arrange(Trainers((6, 4), 10, 60), 600, OPEN)[0] == Shape(1, 1, 10)
    assert arrange(Trainers((6, 4), 10, 30), 600, OPEN)[0] == Shape(1, 2, 5)
    text = arrange(Trainers((8,), 1 << 20, 2 << 20), 600, OPEN)[1]
    assert "1 × 4 × 2" in text and "room for 2" in text


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.integers(1, 40), st.integers(100, 4000))
def test_every_trainer_has_a_place_and_a_copy_one_machine(machines: list[int], held: int, batch: int) -> None:
    trainers = Trainers(tuple(machines), 1, held)
    try:
        shape, _ = arrange(trainers, batch, OPEN)
    except ConfigError:
        assert held < max(machines)
        return
    assert shape.workers == sum(machines)
    together = shape.share * shape.lanes
    assert all(count % together == 0 and count // together <= held for count in machines)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.lanes=3 does not fit 8 workers"):
        arrange(MANY, 600, Shape(0, 3, 0))
    with pytest.raises(ConfigError, match="share one memory"):
        arrange(Trainers((2, 2), 10, 1000), 600, Shape(0, 4, 0))
    with pytest.raises(ConfigError, match="10 MiB each and 20 MiB are free"):
        arrange(Trainers((8,), 10 << 20, 20 << 20), 600, Shape(0, 1, 0))


def test_the_rate_grows_to_what_it_stays() -> None:
    pace = Pace(0.1, factor=4.0, warmup=10)
    rates = [pace.at(iteration) for iteration in range(12)]
    assert rates[0] == 0.1 and rates == sorted(rates) and rates[10] == rates[11] == pytest.approx(0.4)
    assert Pace(0.1).at(0) == Pace(0.1).at(50) == 0.1
    falling = Pace(0.1, decay=1.0, epoch=10.0)
    assert [falling.at(10 * epoch) for epoch in range(4)] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
