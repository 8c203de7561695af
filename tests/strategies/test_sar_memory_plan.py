"""What sar takes within a given memory: the leanest that works, then what pays, in order; and what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import Routes
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import Sketch, Trip, Way
from gnnfleet.strategies.sar.memory_plan import SLACK, Choice, Given, Needs, choose

MIB = 2**20
IN, OUT = ("node", "in"), ("node", "out")


def needs(rows: list[int], trips: list[Trip], resident: float = 0.0, tensors: float = 0.0) -> Needs:
    """A rank that gives as many rows to each of the others as it needs from it."""

    def routes(_: Way) -> Routes:
        return Routes(tuple(torch.zeros(count, dtype=torch.int32) for count in rows), tuple(rows))

    return Needs(resident * MIB, tensors * MIB, Sketch(tuple(trips), 0.0, 0.0), routes)


def trip(layer: int, each: int, *, kept: bool = False, again: bool = False, home: int = 0) -> Trip:
    back = ((IN, home),) if home else ()
    return Trip(layer, ((IN, each),), back, again=again, kept=kept)


def mib(wanted: Needs, choice: Choice) -> float:
    return wanted.bytes(choice) / MIB


def test_rows_on_their_way() -> None:
    # The first rank is this one; it needs 1, 2 and 4 MiB from the others, and gives as much.
    one = needs([0, 1, 2, 4], [trip(0, MIB), trip(1, MIB // 2)], resident=10, tensors=5)
    assert mib(one, Choice(1, 0)) == pytest.approx(10 + SLACK * (5 + 2 * 4))
    assert mib(one, Choice(1, 1)) == pytest.approx(10 + SLACK * (5 + 2 * (4 + 2)))
    assert mib(one, Choice(2, 1)) == mib(one, Choice(4, 9)) == pytest.approx(10 + SLACK * (5 + 2 * 7))
    alone = needs([0], [trip(0, MIB)], resident=1, tensors=1)
    assert mib(alone, Choice(1, 1)) == pytest.approx(1 + SLACK)


def test_rows_that_are_kept() -> None:
    trips = [
        trip(0, MIB, kept=True),
        trip(1, MIB, kept=True),
        trip(1, MIB, again=True, home=MIB),
        trip(0, MIB, again=True),
    ]
    one = needs([0, 3], trips)
    assert mib(one, Choice(1, 0)) == pytest.approx(SLACK * 2 * 6)  # there again and home, in and out
    assert mib(one, Choice(1, 0, keep=(1,))) == pytest.approx(SLACK * (6 + 3))
    assert mib(one, Choice(1, 0, keep=(0, 1))) == pytest.approx(SLACK * (6 + 6))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (40, Choice(4, 1, (0,))),
        (24, Choice(1, 1, (0,))),
        (19, Choice(4, 1)),
        (14, Choice(1, 1)),
        (9, Choice(1, 0)),
    ],
)
def test_more_memory_buys_more(limit: float, expected: Choice) -> None:
    one = needs([0, 2, 2, 2], [trip(0, MIB, kept=True), trip(0, MIB // 4, again=True)], tensors=1)
    sizes = {choice: mib(one, choice) for choice in (expected,)}
    found, why = choose(one, int(limit * MIB), 4, Given(), lambda own: own)
    assert found == expected, (sizes, why)
    assert f"of {limit} MiB per worker" in why and f"{sizes[found]:.0f} MiB" in why


def test_the_worst_rank_decides_and_says_what_it_needs() -> None:
    one = needs([0, 1], [trip(0, MIB)], resident=3)
    with pytest.raises(ConfigError, match=re.escape("a worker needs 50 MiB at least (group 1, prefetch 0)")) as error:
        choose(one, 10 * MIB, 2, Given(), lambda own: 50.0 * MIB)
    assert "found --memory 10 MiB: take more workers or more memory" in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"group": 2}, Choice(2, 1, (0,))),
        ({"prefetch": 3}, Choice(4, 3, (0,))),
        ({"keep": False}, Choice(4, 1)),
        ({"keep": True, "group": 1, "prefetch": 0}, Choice(1, 0, (0,))),
    ],
)
def test_what_the_user_says_stays(given: dict[str, Any], expected: Choice) -> None:
    one = needs([0, 1, 1, 1], [trip(0, MIB, kept=True)])
    assert choose(one, 2**40, 4, Given(**given), lambda own: own)[0] == expected
