"""The schedule of pipe: the order of chunks, the layers of stages, the bubble, chunk layouts."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.comm.world import World
from gnnfleet.errors import PartitionError
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout, open_chunk_layouts, write_chunk_layouts
from gnnfleet.graph.store import save_store
from gnnfleet.report.timeline_svg import ChunkSpan
from gnnfleet.strategies.pipe.schedule import bubble_share, chunk_order, split_layers
from tests.equivalence.spread import typed_graph
from tests.graphs import communities
from tests.ranks import RankPool
from tests.strategies.pipe_runs import losses_of, pipe


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


def train_and_collect_spans(world: World, store: str, partitions: int) -> list[ChunkSpan]:
    """The spans of all ranks in the second epoch."""
    run = pipe(store, world, partitions=partitions, chunks=4 * partitions)
    losses_of(run, range(2))
    return run._all_spans()


@pytest.mark.parametrize(("size", "partitions"), [(2, 1), (4, 2)])
def test_every_chunk_passes_every_stage_once_in_each_direction(
    pool: RankPool, store: Path, size: int, partitions: int
) -> None:
    stages = size // partitions
    spans, *others = pool.run(size, train_and_collect_spans, str(store), partitions)
    assert all(other == spans for other in others) and len(spans) == size * 4 * 2
    began = {(span.stage, span.partition, span.slot, span.is_backward): span.begin for span in spans}
    for stage, partition in product(range(stages), range(partitions)):
        order = list(enumerate(chunk_order(3, 1, partition, 4, shuffle=True)))  # the same in all stages
        computed = [
            (span.slot, span.chunk, span.is_backward)
            for span in spans
            if (span.stage, span.partition) == (stage, partition)
        ]
        assert computed == [(*chunk, False) for chunk in order] + [(*chunk, True) for chunk in order[::-1]]
        for slot in range(4 if stage else 0):  # a stage reads from the previous one, and returns gradients to it
            assert began[stage - 1, partition, slot, False] < began[stage, partition, slot, False]
            assert began[stage, partition, slot, True] < began[stage - 1, partition, slot, True]


def test_orders_are_distinct_permutations() -> None:
    orders = [chunk_order(1, epoch, partition, 8, shuffle=True) for epoch in range(3) for partition in range(2)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert chunk_order(1, 2, 1, 8, shuffle=True) == orders[5]
    assert chunk_order(1, 2, 1, 8, shuffle=False) == list(range(8))


@settings(max_examples=40)
@given(costs=st.lists(st.floats(0.01, 10), min_size=1, max_size=7), stages=st.integers(1, 7))
def test_the_most_expensive_stage_is_as_cheap_as_possible(costs: list[float], stages: int) -> None:
    ranges = split_layers(costs, stages)
    stages = min(stages, len(costs))
    assert [index for layers in ranges for index in layers] == list(range(len(costs))) and len(ranges) == stages
    bounds = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(bound)) for bound in bounds)
    assert max(sum(costs[index] for index in layers) for layers in ranges) == pytest.approx(best)


def test_the_bubble_of_equal_slots() -> None:
    spans = [
        ChunkSpan(stage, 0, slot, slot, is_backward, 0.0, 0.0, 1.0)
        for stage in range(4)
        for slot in range(8)
        for is_backward in (False, True)
    ]
    assert bubble_share(spans, 4) == pytest.approx(3 / 11)
    assert bubble_share(spans[:16], 1) == pytest.approx(0.0)


def test_layouts_are_read_back_and_damage_is_noticed(tmp_path: Path) -> None:
    graph = communities(120)
    layouts = [build_chunk_layout(graph, 1, 4), build_chunk_layout(graph, 2, 6)]
    for layout in layouts:
        assert sorted(layout.order.tolist()) == list(range(120))
        assert torch.equal(layout.order[layout.position], torch.arange(120))
    write_chunk_layouts(graph, layouts, tmp_path / "cut")
    for opened, layout in zip(open_chunk_layouts(tmp_path / "cut"), layouts, strict=True):
        assert torch.equal(opened.order, layout.order) and torch.equal(opened.starts, layout.starts)
        assert (opened.partitions, opened.halo_rows) == (layout.partitions, layout.halo_rows)
        assert opened.chunks_per_partition == layout.chunks_per_partition
        assert torch.equal(opened.digest, layout.digest)
    assert not torch.equal(layouts[0].digest, build_chunk_layout(graph, 1, 4, method="random").digest)
    with pytest.raises(PartitionError, match="evenly"):
        build_chunk_layout(graph, 2, 5)
    assert build_chunk_layout(typed_graph(), 1, 2).starts[-1] == 56, "all node types are in one order"
    (tmp_path / "cut" / "order_0.npy").unlink()
    with pytest.raises(PartitionError):
        open_chunk_layouts(tmp_path / "cut")


def test_chunks_have_equal_shares_of_edges() -> None:
    graph = communities(2000)
    (edges,) = graph.edges.values()
    degree = edges.indptr.diff()
    layout = build_chunk_layout(graph, 2, 8)
    loads = torch.tensor([float(degree[layout.order[slice(*layout.chunk_range(c))]].sum()) for c in range(8)])
    assert float(loads.max() / loads.mean()) < 1.15
