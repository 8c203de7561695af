"""Temporal neighbours equal the reference, are strictly earlier, and do not depend on threads, offsets or appends."""

from __future__ import annotations

from collections import Counter

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
def test_neighbors_equal_the_reference(
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
    actual = table.latest(nodes, times, k, visible=visible)
    expected = reference.temporal_neighbors(stream, (nodes, times), k, visible=visible)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    key = DrawKey(seed, 1, 2)
    actual = table.sample_uniform(nodes, times, k, key, hop=1, visible=visible)
    draws = (key.draws(Purpose.SAMPLE, 1), NODES)
    expected = reference.temporal_neighbors(stream, (nodes, times), k, visible=visible, draws=draws)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_latest_neighbors_of_a_small_stream() -> None:
    src, dst = torch.tensor([0, 2, 1, 0, 3]), torch.tensor([1, 1, 1, 2, 0])
    table = TemporalNeighbors(src, dst, torch.tensor([5, 6, 6, 6, 9]), 4)
    neighbors, events_found = table.latest(torch.tensor([1, 1, 0, 0, 3, -1]), torch.tensor([6, 7, 9, 10, 9, 9]), 3)
    assert neighbors.tolist() == [[0, -1, -1], [1, 2, 0], [2, 1, -1], [3, 2, 1], [-1, -1, -1], [-1, -1, -1]]
    assert events_found.tolist() == [[0, -1, -1], [2, 1, 0], [3, 0, -1], [4, 3, 0], [-1, -1, -1], [-1, -1, -1]]
    neighbors, events_found = table.latest(torch.tensor([0]), torch.tensor([10]), 3, visible=3)
    assert events_found.tolist() == [[0, -1, -1]], "later events are hidden for any time"


def random_stream(count: int = 60_000, nodes: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    src, dst = torch.randint(nodes, (2, count), generator=random)
    return src.contiguous(), dst.contiguous(), torch.randint(0, 3, (count,), generator=random).cumsum(0)


def random_queries(t: Tensor, nodes: int, count: int = 5_000) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randint(nodes, (count,), generator=random), t[torch.randint(len(t), (count,), generator=random)]


def test_neighbors_do_not_depend_on_threads_and_other_queries(threads: int) -> None:
    stream = random_stream()
    table, key = TemporalNeighbors(*stream, 500), DrawKey(3)
    nodes, times = random_queries(stream[2], 500)
    assert num_threads(len(nodes) * 128) == threads
    parallel = [*table.latest(nodes, times, 10), *table.sample_uniform(nodes, times, 10, key)]
    order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(3))
    with single_threaded():
        serial = [
            *table.latest(nodes[order], times[order], 10),
            *table.sample_uniform(nodes[order], times[order], 10, key),
        ]
    for actual, expected in zip(parallel, serial, strict=True):
        assert torch.equal(actual[order], expected)


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_appended_events_equal_events_given_at_once(chunk: int) -> None:
    src, dst, t = random_stream(3_000, 40)
    complete = TemporalNeighbors(src, dst, t, 40)
    grown = TemporalNeighbors(src[:100], dst[:100], t[:100], 40)
    for low in range(100, len(t), chunk):
        grown.append(src[low : low + chunk], dst[low : low + chunk], t[low : low + chunk])
    queries = random_queries(t, 40)
    for actual, expected in zip(grown.latest(*queries, 20), complete.latest(*queries, 20), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(grown.t, t) and grown.num_events == len(t)


def test_a_shift_of_all_times_changes_nothing() -> None:
    src, dst, t = random_stream(3_000, 40)
    nodes, times = random_queries(t, 40)
    neighbors, events_found = TemporalNeighbors(src, dst, t, 40).latest(nodes, times, 5)
    for shift in (1_700_000_000, 2**62):
        shifted = TemporalNeighbors(src, dst, t + shift, 40)
        assert torch.equal(shifted.latest(nodes, times + shift, 5)[1], events_found)
        drawn = shifted.sample_uniform(nodes, times + shift, 5, DrawKey(1))
        assert torch.equal(drawn[1], TemporalNeighbors(src, dst, t, 40).sample_uniform(nodes, times, 5, DrawKey(1))[1])
    as_floats = TemporalNeighbors(src, dst, t.double() + 1e9, 40)
    assert torch.equal(as_floats.latest(nodes, times.double() + 1e9, 5)[0], neighbors)


def test_the_second_hop_precedes_the_events_of_the_first() -> None:
    stream = random_stream(400, 12)
    table = TemporalNeighbors(*stream, 12)
    nodes, times = random_queries(stream[2], 12, 50)
    neighbors, events_found = table.latest(nodes, times, 3)
    second = table.latest(neighbors.view(-1), table.times_of(events_found).view(-1), 2)
    expected = reference.temporal_neighbors(
        stream, (neighbors.view(-1), stream[2][events_found.view(-1).clamp(min=0)]), 2
    )
    assert torch.equal(second[0], expected[0]) and torch.equal(second[1], expected[1])
    assert bool((second[1][neighbors.view(-1) < 0] == -1).all()), "a missing node has no neighbours"


def test_uniform_draws_are_uniform() -> None:
    count, times = 70, 20_000
    src, dst = torch.zeros(count, dtype=torch.int64), torch.arange(1, count + 1)
    table = TemporalNeighbors(src, dst, torch.arange(count), count + 1)
    counts: Counter[int] = Counter()
    for step in range(times // 100):
        _, events_found = table.sample_uniform(
            torch.zeros(1, dtype=torch.int64), torch.tensor([count]), 5, DrawKey(0, 0, step)
        )
        assert len(set(events_found[0].tolist())) == 5 and bool((events_found[0].diff() < 0).all())
        counts.update(events_found[0].tolist())
    mean = 5 * times / 100 / count
    assert sum((counts[event] - mean) ** 2 / mean for event in range(count)) < 115, "one in ten thousand"


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
def test_pair_history_counts_back_from_the_query(
    events: list[tuple[tuple[int, int], int]], depth: int, visible: int | None
) -> None:
    src, dst, t = stream_of([pair for pair, _ in events], [gap for _, gap in events], start=0, dtype=torch.int64)
    table = TemporalNeighbors(src, dst, t, NODES)
    nodes = torch.arange(NODES).repeat(2)
    before = table.count_before(torch.tensor([3, 20]).repeat_interleave(NODES), visible=visible)
    others = torch.arange(-1, NODES).expand(len(nodes), -1)
    history = table.pair_history(nodes, others, before, depth=depth)
    for row, (node, visible_events) in enumerate(zip(nodes.tolist(), before.tolist(), strict=True)):
        events_of_node = [e for e in range(visible_events) if node in (int(src[e]), int(dst[e]))]
        assert int(table.counts(nodes, before)[row]) == len(events_of_node)
        partners = [int(dst[e]) if int(src[e]) == node else int(src[e]) for e in events_of_node][::-1][:depth]
        for column, other in enumerate(others[row].tolist()):
            gap = partners.index(other) + 1 if other in partners else 0
            expected = (partners.count(other), gap, events_of_node[-gap] if gap else -1)
            assert tuple(int(part[row, column]) for part in history) == expected


def test_pair_history_does_not_depend_on_threads(threads: int) -> None:
    stream = random_stream()
    table = TemporalNeighbors(*stream, 500)
    src, times = random_queries(stream[2], 500, 600)
    dst = torch.randint(500, (600, 30), generator=torch.Generator().manual_seed(4))
    parallel = table.pair_history(src, dst, table.count_before(times), depth=200)
    with single_threaded():
        serial = table.pair_history(src, dst, table.count_before(times), depth=200)
    assert all(torch.equal(a, b) for a, b in zip(parallel, serial, strict=True))
    assert int((parallel.number > 0).sum()) > 1000
