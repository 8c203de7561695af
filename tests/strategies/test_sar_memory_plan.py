"""What sar takes within a given memory: the leanest that works, then what pays, in order; and what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.sar.memory_plan import MEMORY_SLACK, MemoryChoice, MemoryNeeds, UserChoice, choose_memory_plan

MIB = 2**20
IN, OUT = ("node", "in"), ("node", "out")


def needs(rows: list[int], trips: list[TracedExchange], resident: float = 0.0, tensors: float = 0.0) -> MemoryNeeds:
    """A rank that gives as many rows to each of the others as it needs from it."""

    def routes(_: RouteKey) -> ExchangePlan:
        return ExchangePlan(tuple(torch.zeros(count, dtype=torch.int32) for count in rows), tuple(rows))

    return MemoryNeeds(resident * MIB, tensors * MIB, StepTrace(tuple(trips), 0.0, 0.0), routes)


def trip(layer: int, each: int, *, kept: bool = False, again: bool = False, home: int = 0) -> TracedExchange:
    back = ((IN, home),) if home else ()
    return TracedExchange(layer, ((IN, each),), back, is_refetch=again, cached_bytes=kept)


def mib(wanted: MemoryNeeds, choice: MemoryChoice) -> float:
    return wanted.bytes(choice) / MIB


def test_rows_on_their_way() -> None:
    # The first rank is this one; it needs 1, 2 and 4 MiB from the others, and gives as much.
    one = needs([0, 1, 2, 4], [trip(0, MIB), trip(1, MIB // 2)], resident=10, tensors=5)
    assert mib(one, MemoryChoice(1, 0)) == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * 4))
    assert mib(one, MemoryChoice(1, 1)) == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * (4 + 2)))
    assert (
        mib(one, MemoryChoice(2, 1)) == mib(one, MemoryChoice(4, 9)) == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * 7))
    )
    alone = needs([0], [trip(0, MIB)], resident=1, tensors=1)
    assert mib(alone, MemoryChoice(1, 1)) == pytest.approx(1 + MEMORY_SLACK)


def test_rows_that_are_kept() -> None:
    trips = [
        trip(0, MIB, kept=True),
        trip(1, MIB, kept=True),
        trip(1, MIB, again=True, home=MIB),
        trip(0, MIB, again=True),
    ]
    one = needs([0, 3], trips)
    assert mib(one, MemoryChoice(1, 0)) == pytest.approx(MEMORY_SLACK * 2 * 6)  # there again and home, in and out
    assert mib(one, MemoryChoice(1, 0, cached_layers=(1,))) == pytest.approx(MEMORY_SLACK * (6 + 3))
    assert mib(one, MemoryChoice(1, 0, cached_layers=(0, 1))) == pytest.approx(MEMORY_SLACK * (6 + 6))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (40, MemoryChoice(4, 1, (0,))),
        (24, MemoryChoice(1, 1, (0,))),
        (19, MemoryChoice(4, 1)),
        (14, MemoryChoice(1, 1)),
        (9, MemoryChoice(1, 0)),
    ],
)
def test_more_memory_buys_more(limit: float, expected: MemoryChoice) -> None:
    one = needs([0, 2, 2, 2], [trip(0, MIB, kept=True), trip(0, MIB // 4, again=True)], tensors=1)
    sizes = {choice: mib(one, choice) for choice in (expected,)}
    found, why = choose_memory_plan(one, int(limit * MIB), 4, UserChoice(), lambda own: own)
    assert found == expected, (sizes, why)
    assert f"of {limit} MiB per worker" in why and f"{sizes[found]:.0f} MiB" in why


def test_the_worst_rank_decides_and_says_what_it_needs() -> None:
    one = needs([0, 1], [trip(0, MIB)], resident=3)
    with pytest.raises(ConfigError, match=re.escape("a worker needs 50 MiB at least (group 1, prefetch 0)")) as error:
        choose_memory_plan(one, 10 * MIB, 2, UserChoice(), lambda own: 50.0 * MIB)
    assert "found --memory 10 MiB: take more workers or more memory" in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"group": 2}, MemoryChoice(2, 1, (0,))),
        ({"prefetch": 3}, MemoryChoice(4, 3, (0,))),
        ({"cache_for_backward": False}, MemoryChoice(4, 1)),
        ({"cache_for_backward": True, "group": 1, "prefetch": 0}, MemoryChoice(1, 0, (0,))),
    ],
)
def test_what_the_user_says_stays(given: dict[str, Any], expected: MemoryChoice) -> None:
    one = needs([0, 1, 1, 1], [trip(0, MIB, kept=True)])
    assert choose_memory_plan(one, 2**40, 4, UserChoice(**given), lambda own: own)[0] == expected
