"""Event streams: stable sorting, slices without copies, splits by time and batch boundaries."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.graph import EdgeType, Graph, Nodes, validated_edges
from gnnfleet.graph.ingest.tables import EdgeTable, TableSpec, classify_tables, import_tables
from gnnfleet.graph.store import open_store
from tests.graphs import event_stream


def random_events(count: int, *, nodes: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    pairs = torch.randint(nodes, (2, count), generator=random)
    return pairs[0], pairs[1], torch.randint(0, max(1, count // 3), (count,), generator=random)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_unsorted_events_are_sorted_stably(dtype: torch.dtype) -> None:
    src, dst, t = random_events(200)
    msg = torch.arange(200.0)[:, None]
    order = sorted(range(200), key=lambda i: int(t[i]))  # Python's sort is stable
    t = t.to(dtype)
    from_graph = EventStream.of(Graph(torch.stack([src, dst]), time=t, edge_attr=msg, num_nodes=9))
    plain = event_stream(src, dst, t, msg=msg, num_nodes=9)
    for stream in (from_graph, plain):
        assert torch.equal(stream.src, src[order]) and torch.equal(stream.dst, dst[order])
        assert torch.equal(stream.t, t[order]) and stream.t.dtype == dtype
        assert stream.msg is not None and torch.equal(stream.msg, msg[order])
        assert stream.num_nodes == 9 and torch.equal(stream.destinations, torch.unique(dst))
    edges = Graph(torch.stack([src, dst]), num_nodes=9).single_edges
    assert torch.equal(edges.src[from_graph.edge_ids].long(), src[order]), "edge_ids are store edge ids"


def shop(times: tuple[bool, bool]) -> Graph:
    buys, likes = EdgeType("user", "buys", "item"), EdgeType("user", "likes", "item")
    pairs = torch.tensor([[0, 1, 1], [3, 0, 3]])
    kinds = {
        kind: validated_edges(pairs, num_src=2, num_dst=4, time=[5, 3, 4] if timed else None)
        for kind, timed in zip((buys, likes), times, strict=True)
    }
    return Graph.of({"user": Nodes(count=2), "item": Nodes(count=4)}, kinds)


def test_nodes_of_all_types_share_one_numbering_and_destinations_are_one_type() -> None:
    stream = EventStream.of(shop((True, False)))
    assert stream.src.tolist() == [1, 1, 0] and stream.dst.tolist() == [2, 5, 5] and stream.t.tolist() == [3, 4, 5]
    assert stream.num_nodes == 6 and stream.destinations.tolist() == [2, 3, 4, 5]
    assert EventStream.of(shop((True, True)), "user:likes:item").dst.tolist() == [2, 5, 5]


def test_graphs_without_a_clear_event_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="no edges have times"):
        EventStream.of(shop((False, False)))
    with pytest.raises(ConfigError, match=r"user:buys:item, user:likes:item.*name one"):
        EventStream.of(shop((True, True)))
    with pytest.raises(ConfigError, match="have no times"):
        EventStream.of(shop((True, False)), "user:likes:item")
    with pytest.raises(InputError, match="float32"):
        event_stream(torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))


def test_slices_are_views_that_keep_event_numbers() -> None:
    src, dst, t = random_events(50)
    stream = event_stream(src, dst, t, msg=torch.rand(50, 2), y=torch.arange(50))
    part = stream.slice(10, 40).slice(5, 100)
    assert len(part) == 25 and part.numbers.tolist() == list(range(15, 40))
    for name in ("src", "dst", "t", "msg", "y", "edge_ids"):
        sliced, column = getattr(part, name), getattr(stream, name)
        assert torch.equal(sliced, column[15:40])
        assert sliced.data_ptr() == column[15:].data_ptr(), "no copy"


@given(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=60), st.sampled_from([0, 1_700_000_000]))
@settings(max_examples=100, deadline=None)
def test_the_split_is_by_quantiles_of_time(gaps: list[int], start: int) -> None:
    t = torch.tensor(gaps).cumsum(0) + start
    ends = torch.zeros(len(gaps), dtype=torch.int64)
    parts = event_stream(ends, ends, t).split()
    times = t.numpy()
    first, second = np.quantile(times, [0.70, 0.85])  # as TGB has it
    expected = [int(mask.sum()) for mask in (times <= first, (times > first) & (times <= second), times > second)]
    assert [len(part) for part in parts] == expected
    far = event_stream(ends, ends, t + 2**62).split()
    assert [len(part) for part in far] == expected, "also if float64 cannot hold the times"


@given(st.lists(st.sampled_from([0, 0, 0, 1]), max_size=60), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_batches_end_between_times_unless_ties_are_cut(gaps: list[int], size: int) -> None:
    t = torch.tensor(gaps, dtype=torch.int64).cumsum(0)
    ends = torch.zeros(len(gaps), dtype=torch.int64)
    stream = event_stream(ends, ends, t)
    cut = stream.batches(size, keep_ties=False)
    assert cut[0] == 0 and cut[-1] == len(t) and all(b - a == size for a, b in itertools.pairwise(cut[:-1]))
    bounds = stream.batches(size)
    assert bounds[0] == 0 and bounds[-1] == len(t)
    for lo, hi in itertools.pairwise(bounds):
        assert hi == len(t) or t[hi] > t[hi - 1], "equal times are not split"
        assert hi - lo >= min(size, len(t) - lo)
        assert hi - lo <= size or t[lo + size - 1] == t[hi - 1], "no longer than the tie needs"
    for lo, hi in itertools.pairwise(cut):
        assert hi - lo <= size


def count_distinct_ends(src: Tensor, dst: Tensor, bounds: list[int]) -> int:
    return sum(len(set(src[lo:hi].tolist()) | set(dst[lo:hi].tolist())) for lo, hi in itertools.pairwise(bounds))


@given(seed=st.integers(0, 50), count=st.integers(1, 80), size=st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_capture_ratio_is_the_share_of_distinct_ends(seed: int, count: int, size: int) -> None:
    src, dst, t = random_events(count, seed=seed)
    stream = event_stream(src, dst, t)
    expected = count_distinct_ends(stream.src, stream.dst, stream.batches(size, keep_ties=False)) / (2 * count)
    assert stream.capture_ratio([size, 1])[0] == expected


def test_an_empty_stream_has_empty_batches_and_splits() -> None:
    none = torch.empty(0, dtype=torch.int64)
    stream = event_stream(none, none, none)
    assert stream.batches(5) == [0]
    assert [len(part) for part in stream.split()] == [0, 0, 0]


@pytest.mark.parametrize("typed", [False, True])
def test_wikipedia_is_imported_from_one_table(shared_data: Path, tmp_path: Path, typed: bool) -> None:
    path = str(shared_data / "temporal" / "ml_wikipedia.txt")
    if typed:
        table = EdgeTable(files=(path,), columns="src,dst,time")
        spec = TableSpec(edges={EdgeType("user", "edits", "page"): table})
    else:
        spec = classify_tables([path], columns="src,dst,time")
    import_tables(spec, tmp_path / "wiki")
    stream = EventStream.of(open_store(tmp_path / "wiki"))
    rows = np.loadtxt(path, dtype=np.int64)
    assert np.array_equal(stream.src.numpy(), rows[:, 0] - 1) and np.array_equal(stream.dst.numpy(), rows[:, 1] - 1)
    assert np.array_equal(stream.t.numpy(), rows[:, 2])
    assert stream.destinations.tolist() == list(range(8227, 9227))
    assert [len(part) for part in stream.split()] == [110_232, 23_621, 23_621]
    assert [round(share, 3) for share in stream.capture_ratio([100, 200, 600, 4800])] == [0.443, 0.366, 0.273, 0.147]


def test_bitcoin_is_imported_unsorted_with_a_header(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "temporal" / "soc-sign-bitcoinalpha.csv"
    import_tables(classify_tables([str(path)]), tmp_path / "bitcoin")
    graph = open_store(tmp_path / "bitcoin")
    stream = EventStream.of(graph)
    rows = np.loadtxt(path, dtype=np.int64, delimiter=",", skiprows=1)
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    ids = graph.single_nodes.ids.select(torch.cat([stream.src, stream.dst])).to_pylist()
    assert ids == rows[:, 0].tolist() + rows[:, 1].tolist()
    assert stream.msg is not None and stream.msg[:, 0].tolist() == rows[:, 2].tolist()
    assert np.array_equal(stream.t.numpy(), rows[:, 3])
