"""Neighbours in time equal their plain twin, look strictly back, and know nothing of threads, offsets or pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.native import num_threads, single_threaded
from gnnfleet.ops.temporal_neighbors import TemporalNeighbors
from tests.ops import reference

NODES = 7


def stream_of(ends: list[tuple[int, int]], gaps: list[int], *, start: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    pairs = torch.tensor(ends, dtype=torch.int64).view(-1, 2)
    t = torch.tensor(gaps, dtype=torch.int64).cumsum(0)
    t = t + start if dtype == torch.int64 else t.double() / 4 + start
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), t


node = st.integers(0, NODES - 1)
events = st.lists(st.tuples(st.tuples(node, node), st.sampled_from([0, 0, 1, 1, 5])), max_size=40)
starts = st.sampled_from(
    [(0, torch.int64), (2**62 - 10, torch.int64), (0, torch.float64), (1_700_000_000, torch.float64)]
)


@given(
    events=events, start=starts, k=st.integers(0, 9), visible=st.none() | st.integers(0, 45), seed=st.integers(0, 99)
)
@settings(max_examples=150, deadline=None)
def test_neighbours_equal_the_reference(
    events: list[tuple[tuple[int, int], int]],
    start: tuple[int, torch.dtype],
    k: int,
    visible: int | None,
    seed: int,
) -> None:
    stream = stream_of([pair for pair, _ in events], [gap for _, gap in events], start=start[0], dtype=start[1])
    table = TemporalNeighbors(*stream, NODES)
    random = torch.Generator().manual_seed(seed)
    times = torch.cat([stream[2], stream[2] + 1, stream[2][:1] - 1])  # ties, after everything, before everything
    nodes = torch.randint(-1, NODES, (len(times),), generator=random)
    found = table.latest(nodes, times, k, visible=visible)
    expected = reference.temporal_neighbors(stream, (nodes, times), k, visible=visible)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    key = DrawKey(seed, 1, 2)
    found = table.sample_uniform(nodes, times, k, key, hop=1, visible=visible)
    draws = (key.draws(Purpose.SAMPLE, 1), NODES)
    expected = reference.temporal_neighbors(stream, (nodes, times), k, visible=visible, draws=draws)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_neighbours_of_a_small_stream() -> None:
    src, dst = torch.tensor([0, 2, 1, 0, 3]), torch.tensor([1, 1, 1, 2, 0])
    table = TemporalNeighbors(src, dst, torch.tensor([5, 6, 6, 6, 9]), 4)
    near, when = table.latest(torch.tensor([1, 1, 0, 0, 3, -1]), torch.tensor([6, 7, 9, 10, 9, 9]), 3)
    assert near.tolist() == [[0, -1, -1], [1, 2, 0], [2, 1, -1], [3, 2, 1], [-1, -1, -1], [-1, -1, -1]]
    assert when.tolist() == [[0, -1, -1], [2, 1, 0], [3, 0, -1], [4, 3, 0], [-1, -1, -1], [-1, -1, -1]]
    near, when = table.latest(torch.tensor([0]), torch.tensor([10]), 3, visible=3)
    assert when.tolist() == [[0, -1, -1]], "later events are hidden whatever the time"


def random_stream(count: int = 60_000, nodes: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    src, dst = torch.randint(nodes, (2, count), generator=random)
    return src.contiguous(), dst.contiguous(), torch.randint(0, 3, (count,), generator=random).cumsum(0)


@pytest.fixture(params=[2, 4])
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def questions(t: Tensor, nodes: int, count: int = 5_000) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randint(nodes, (count,), generator=random), t[torch.randint(len(t), (count,), generator=random)]


def test_results_depend_neither_on_threads_nor_on_other_queries(team: int) -> None:
    stream = random_stream()
    table, key = TemporalNeighbors(*stream, 500), DrawKey(3)
    nodes, times = questions(stream[2], 500)
    assert num_threads(len(nodes) * 128) == team
    many = [*table.latest(nodes, times, 10), *table.sample_uniform(nodes, times, 10, key)]
    order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(3))
    with single_threaded():
        one = [
            *table.latest(nodes[order], times[order], 10),
            *table.sample_uniform(nodes[order], times[order], 10, key),
        ]
    for found, expected in zip(many, one, strict=True):
        assert torch.equal(found[order], expected)


@pytest.mark.parametrize("piece", [1, 7, 200])
def test_appended_events_equal_events_given_at_the_start(piece: int) -> None:
    src, dst, t = random_stream(3_000, 40)
    whole = TemporalNeighbors(src, dst, t, 40)
    grown = TemporalNeighbors(src[:100], dst[:100], t[:100], 40)
    for low in range(100, len(t), piece):
        grown.append(src[low : low + piece], dst[low : low + piece], t[low : low + piece])
    asked = questions(t, 40)
    for found, expected in zip(grown.latest(*asked, 20), whole.latest(*asked, 20), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(grown.t, t) and grown.num_events == len(t)


def test_a_shift_of_all_times_changes_nothing() -> None:
    src, dst, t = random_stream(3_000, 40)
    nodes, times = questions(t, 40)
    near, when = TemporalNeighbors(src, dst, t, 40).latest(nodes, times, 5)
    for shift in (1_700_000_000, 2**62):
        moved = TemporalNeighbors(src, dst, t + shift, 40)
        assert torch.equal(moved.latest(nodes, times + shift, 5)[1], when)
        drawn = moved.sample_uniform(nodes, times + shift, 5, DrawKey(1))
        assert torch.equal(drawn[1], TemporalNeighbors(src, dst, t, 40).sample_uniform(nodes, times, 5, DrawKey(1))[1])
    as_floats = TemporalNeighbors(src, dst, t.double() + 1e9, 40)
    assert torch.equal(as_floats.latest(nodes, times.double() + 1e9, 5)[0], near)


def test_a_second_hop_starts_at_the_events_of_the_first() -> None:
    stream = random_stream(400, 12)
    table = TemporalNeighbors(*stream, 12)
    nodes, times = questions(stream[2], 12, 50)
    near, when = table.latest(nodes, times, 3)
    second = table.latest(near.view(-1), table.times_of(when).view(-1), 2)
    expected = reference.temporal_neighbors(stream, (near.view(-1), stream[2][when.view(-1).clamp(min=0)]), 2)
    assert torch.equal(second[0], expected[0]) and torch.equal(second[1], expected[1])
    assert bool((second[1][near.view(-1) < 0] == -1).all()), "who is not there has no neighbours"


def test_uniform_draws_are_uniform() -> None:
    count, times = 70, 20_000
    src, dst = torch.zeros(count, dtype=torch.int64), torch.arange(1, count + 1)
    table = TemporalNeighbors(src, dst, torch.arange(count), count + 1)
    seen: Counter[int] = Counter()
    for step in range(times // 100):
        _, when = table.sample_uniform(torch.zeros(1, dtype=torch.int64), torch.tensor([count]), 5, DrawKey(0, 0, step))
        assert len(set(when[0].tolist())) == 5 and bool((when[0].diff() < 0).all())
        seen.update(when[0].tolist())
    mean = 5 * times / 100 / count
    assert sum((seen[event] - mean) ** 2 / mean for event in range(count)) < 115, "one in ten thousand"


@pytest.mark.parametrize(
    ("src", "t", "message"),
    [
        ([0, 9], [1, 2], "nodes outside 0 to 3"),
        ([0, -1], [1, 2], "nodes outside 0 to 3"),
        ([0, 1], [2, 1], "order of their times"),
        ([0, 1], [1], "equal length"),
    ],
)
def test_invalid_events_are_refused(src: list[int], t: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TemporalNeighbors(torch.tensor(src), torch.tensor([1, 2]), torch.tensor(t), 4)


def test_a_refused_append_adds_nothing() -> None:
    table = TemporalNeighbors(torch.tensor([0]), torch.tensor([1]), torch.tensor([5]), 2)
    for src, t in (([0], [4]), ([7], [6])):
        with pytest.raises(InputError):
            table.append(torch.tensor(src), torch.tensor([1]), torch.tensor(t))
    assert table.num_events == 1 and table.latest(torch.tensor([0]), torch.tensor([9]), 2)[1].tolist() == [[0, -1]]
    with pytest.raises(InputError, match="float32"):
        TemporalNeighbors(torch.tensor([0]), torch.tensor([1]), torch.tensor([5.0]), 2)
    with pytest.raises(InputError, match="float64"):
        table.latest(torch.tensor([0]), torch.tensor([9.0], dtype=torch.float64), 2)
    with pytest.raises(InputError, match="node 2 does not exist"):
        table.latest(torch.tensor([2]), torch.tensor([9]), 2)


@given(events=events, depth=st.sampled_from([1, 3, 100]), visible=st.none() | st.integers(0, 45))
@settings(max_examples=60, deadline=None)
def test_pair_history_equals_a_count_by_hand(
    events: list[tuple[tuple[int, int], int]], depth: int, visible: int | None
) -> None:
    src, dst, t = stream_of([pair for pair, _ in events], [gap for _, gap in events], start=0, dtype=torch.int64)
    table = TemporalNeighbors(src, dst, t, NODES)
    asked = torch.arange(NODES).repeat(2)
    before = table.count_before(torch.tensor([3, 20]).repeat_interleave(NODES), visible=visible)
    others = torch.arange(-1, NODES).expand(len(asked), -1)
    found = table.pair_history(asked, others, before, depth=depth)
    for row, (node, known) in enumerate(zip(asked.tolist(), before.tolist(), strict=True)):
        mine = [e for e in range(known) if node in (int(src[e]), int(dst[e]))]
        assert int(table.counts(asked, before)[row]) == len(mine)
        company = [int(dst[e]) if int(src[e]) == node else int(src[e]) for e in mine][::-1][:depth]
        for column, other in enumerate(others[row].tolist()):
            gap = company.index(other) + 1 if other in company else 0
            expected = (company.count(other), gap, mine[-gap] if gap else -1)
            assert tuple(int(part[row, column]) for part in found) == expected


def test_pair_history_is_equal_for_any_number_of_threads(team: int) -> None:
    stream = random_stream()
    table = TemporalNeighbors(*stream, 500)
    src, times = questions(stream[2], 500, 600)
    dst = torch.randint(500, (600, 30), generator=torch.Generator().manual_seed(4))
    many = table.pair_history(src, dst, table.count_before(times), depth=200)
    with single_threaded():
        one = table.pair_history(src, dst, table.count_before(times), depth=200)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))
    assert int((many.number > 0).sum()) > 1000
