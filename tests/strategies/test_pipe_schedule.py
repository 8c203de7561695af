"""Schedule of pipe: the order of chunks, stages of layers, the bubble, chunk layouts."""

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
from gnnfleet.strategies.pipe.schedule import ChunkSpan, bubble_share, chunk_order, split_layers
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from tests.equivalence.spread import typed_graph
from tests.graphs import communities
from tests.ranks import Crew
from tests.strategies.pipe_runs import pipe


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipe") / "store"
    save_store(communities(200), path)
    return path


def spans_of(world: World, store: str, ways: int) -> list[ChunkSpan]:
    """What all ranks did in the second epoch."""
    run = pipe(store, world, ways=ways, chunks=4 * ways)
    for epoch in range(2):
        list(run.train_epoch(epoch))
    assert isinstance(run, PipeStrategy)
    return run._every_span()


@pytest.mark.parametrize(("size", "ways"), [(2, 1), (4, 2)])
def test_every_chunk_passes_every_stage_once_each_way(crew: Crew, store: Path, size: int, ways: int) -> None:
    stages, (spans, *others) = size // ways, crew.run(size, spans_of, str(store), ways)
    assert all(other == spans for other in others) and len(spans) == size * 4 * 2
    began = {(span.stage, span.way, span.turn, span.back): span.begin for span in spans}
    for stage, way in product(range(stages), range(ways)):
        there = list(enumerate(chunk_order(3, 1, way, 4, shuffle=True)))  # the same in all stages of a way
        own = [(span.turn, span.chunk, span.back) for span in spans if (span.stage, span.way) == (stage, way)]
        assert own == [(*each, False) for each in there] + [(*each, True) for each in there[::-1]]
        for turn in range(4 if stage else 0):  # what a stage works on comes from the one before, and goes back to it
            assert began[stage - 1, way, turn, False] < began[stage, way, turn, False]
            assert began[stage, way, turn, True] < began[stage - 1, way, turn, True]


def test_orders_are_permutations_of_their_own() -> None:
    orders = [chunk_order(1, epoch, way, 8, shuffle=True) for epoch in range(3) for way in range(2)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert chunk_order(1, 2, 1, 8, shuffle=True) == orders[5]
    assert chunk_order(1, 2, 1, 8, shuffle=False) == list(range(8))


@settings(max_examples=40)
@given(costs=st.lists(st.floats(0.01, 10), min_size=1, max_size=7), stages=st.integers(1, 7))
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int) -> None:
    found = split_layers(costs, stages)
    stages = min(stages, len(costs))
    assert [index for each in found for index in each] == list(range(len(costs))) and len(found) == stages
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[index] for index in each) for each in found) == pytest.approx(best)


def test_the_bubble_of_equal_slots() -> None:
    spans = [
        ChunkSpan(stage, 0, turn, turn, back, 0.0, 0.0, 1.0)
        for stage in range(4)
        for turn in range(8)
        for back in (False, True)
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
        assert (opened.partitions, opened.halo_rows, opened.chunks_per_partition) == (
            layout.partitions,
            layout.halo_rows,
            layout.chunks_per_partition,
        )
        assert torch.equal(opened.digest, layout.digest)
    assert not torch.equal(layouts[0].digest, build_chunk_layout(graph, 1, 4, method="random").digest)
    with pytest.raises(PartitionError, match="evenly"):
        build_chunk_layout(graph, 2, 5)
    with pytest.raises(PartitionError, match="one node type"):
        build_chunk_layout(typed_graph(), 1, 2)
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


# -- runs --
