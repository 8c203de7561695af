"""The settings of sar within a memory limit: the smallest peak first, then upgrades in order; and the remark."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.errors import ConfigError
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.estimates import MEMORY_SLACK
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import MemoryChoice, MemoryNeeds, choose_memory_plan

MIB = 2**20
IN, OUT = ("node", "in"), ("node", "out")


def make_needs(
    rows: list[int], exchanges: list[TracedExchange], resident: float = 0.0, tensors: float = 0.0
) -> MemoryNeeds:
    """A rank that sends as many rows to each other rank as it receives from it."""

    def exchange_plan(_: RouteKey) -> ExchangePlan:
        return ExchangePlan(tuple(torch.zeros(count, dtype=torch.int32) for count in rows), tuple(rows))

    return MemoryNeeds(resident * MIB, tensors * MIB, StepTrace(tuple(exchanges), 0.0, 0.0), exchange_plan)


def exchange(
    layer: int, row_bytes: int, *, cacheable: bool = False, refetch: bool = False, returned: int = 0
) -> TracedExchange:
    returned_bytes = ((IN, returned),) if returned else ()
    return TracedExchange(layer, ((IN, row_bytes),), returned_bytes, is_refetch=refetch, is_cacheable=cacheable)


def mib(needs: MemoryNeeds, choice: MemoryChoice) -> float:
    return needs.bytes(choice) / MIB


def test_memory_of_exchanged_rows_grows_with_group_and_prefetch() -> None:
    # The first rank is this one; it receives 1, 2 and 4 MiB from the others, and sends as much.
    needs = make_needs([0, 1, 2, 4], [exchange(0, MIB), exchange(1, MIB // 2)], resident=10, tensors=5)
    assert mib(needs, MemoryChoice(1, 0)) == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * 4))
    assert mib(needs, MemoryChoice(1, 1)) == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * (4 + 2)))
    assert (
        mib(needs, MemoryChoice(2, 1))
        == mib(needs, MemoryChoice(4, 9))
        == pytest.approx(10 + MEMORY_SLACK * (5 + 2 * 7))
    )
    single = make_needs([0], [exchange(0, MIB)], resident=1, tensors=1)
    assert mib(single, MemoryChoice(1, 1)) == pytest.approx(1 + MEMORY_SLACK)


def test_memory_of_cached_rows_replaces_a_refetch() -> None:
    exchanges = [
        exchange(0, MIB, cacheable=True),
        exchange(1, MIB, cacheable=True),
        exchange(1, MIB, refetch=True, returned=MIB),
        exchange(0, MIB, refetch=True),
    ]
    needs = make_needs([0, 3], exchanges)
    assert mib(needs, MemoryChoice(1, 0)) == pytest.approx(MEMORY_SLACK * 2 * 6)  # sent and received, twice
    assert mib(needs, MemoryChoice(1, 0, cached_layers=(1,))) == pytest.approx(MEMORY_SLACK * (6 + 3))
    assert mib(needs, MemoryChoice(1, 0, cached_layers=(0, 1))) == pytest.approx(MEMORY_SLACK * (6 + 6))


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
def test_more_memory_allows_more_upgrades(limit: float, expected: MemoryChoice) -> None:
    needs = make_needs([0, 2, 2, 2], [exchange(0, MIB, cacheable=True), exchange(0, MIB // 4, refetch=True)], tensors=1)
    expected_mib = mib(needs, expected)
    choice, remark = choose_memory_plan(needs, int(limit * MIB), 4, SarConfig(), lambda peak: peak)
    assert choice == expected, (expected_mib, remark)
    assert f"of {limit} MiB per worker" in remark and f"{expected_mib:.0f} MiB" in remark


def test_the_worst_rank_decides_and_the_error_names_its_minimum() -> None:
    needs = make_needs([0, 1], [exchange(0, MIB)], resident=3)
    with pytest.raises(ConfigError, match=re.escape("a worker needs at least 50 MiB (group 1, prefetch 0)")) as error:
        choose_memory_plan(needs, 10 * MIB, 2, SarConfig(), lambda _: 50.0 * MIB)
    assert "found --memory 10 MiB: use more workers, more memory" in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"group": 2}, MemoryChoice(2, 1, (0,))),
        ({"prefetch": 3}, MemoryChoice(4, 3, (0,))),
        ({"cache_for_backward": False}, MemoryChoice(4, 1)),
        ({"cache_for_backward": True, "group": 1, "prefetch": 0}, MemoryChoice(1, 0, (0,))),
    ],
)
def test_options_that_are_set_are_never_changed(options: dict[str, Any], expected: MemoryChoice) -> None:
    needs = make_needs([0, 1, 1, 1], [exchange(0, MIB, cacheable=True)])
    assert choose_memory_plan(needs, 2**40, 4, SarConfig(**options), lambda peak: peak)[0] == expected
