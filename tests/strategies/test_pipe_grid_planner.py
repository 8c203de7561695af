"""The choice of a grid of pipe: estimates from given figures, and the figures that a profile measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition
from gnnfleet.strategies.pipe import profile
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.grid_planner import (
    ClusterProfile,
    GridCandidate,
    LayerCost,
    ModelCost,
    choose_grid,
    estimate_grid,
)
from gnnfleet.strategies.pipe.pipeline_rank import should_cache_inputs
from gnnfleet.strategies.pipe.profile import CpuShare, chunk_load, chunk_loads, profile_cluster, profile_model
from gnnfleet.training.build import RankContext, make_job, validate
from tests.graphs import communities
from tests.ranks import RankPool

LAYER = LayerCost(1e-4, 1e-5, 256, 256, 256, 0)


def equal_loads(chunks: int, load: int = 21_000) -> list[int]:
    """Chunks of equal loads."""
    return [load // chunks] * chunks


def seconds(model: ModelCost, grid: GridCandidate, cluster: ClusterProfile, loads: list[int], rows: int = 20) -> float:
    return estimate_grid(model, grid, cluster, rows=rows, loads=loads).seconds


def test_the_choice_is_never_slower_than_one_worker() -> None:
    for bandwidth in (1e5, 1e7, 1e9):
        cluster = ClusterProfile(bandwidth, 1e-3, 2.0)
        grids = [
            GridCandidate(1, 1, 1),
            GridCandidate(1, 8, 32),
            GridCandidate(2, 4, 32, (900, 900)),
            GridCandidate(8, 1, 8, (5000, 5000)),
        ]
        layer = LayerCost(1e-4, 1e-5, 256, 256, 256, 0, ("weight",))
        model = ModelCost((layer,) * 32, {"weight": 10**6})
        estimates = [estimate_grid(model, grid, cluster, rows=1000, loads=equal_loads(grid.chunks)) for grid in grids]
        best, lines = choose_grid(estimates)
        assert best.seconds <= estimates[0].seconds and len(lines) == 4 and str(best.candidate) in lines[0]


def test_a_pipeline_sends_less_if_halos_of_all_layers_outweigh_the_rows_between_stages() -> None:
    cluster, model = ClusterProfile(1e6), ModelCost((LAYER,) * 8, {})
    for halo in (10, 100, 1000, 3000):
        pipeline = estimate_grid(model, GridCandidate(1, 4, 16), cluster, rows=1600, loads=equal_loads(16))
        graph = estimate_grid(model, GridCandidate(4, 1, 4, (halo, halo)), cluster, rows=1600, loads=equal_loads(4))
        assert pipeline.bytes == 2 * 3 * 1600 * 256 and graph.bytes == 2 * 8 * halo * 256
        assert (pipeline.bytes < graph.bytes) == (8 * halo > 3 * 1600)


def test_seconds_follow_from_base_load_bandwidth_and_latency() -> None:
    """A layer takes a fixed time per chunk and a time per row and edge; stages fill and drain."""
    model = ModelCost((LayerCost(1.0, 0.1, 8, 0, 4, 0), LayerCost(2.0, 0.1, 8, 4, 4, 0)), {})
    fast = ClusterProfile(1e18)
    assert seconds(model, GridCandidate(1, 1, 1), fast, [40]) == pytest.approx(5 + 6)
    # Two slots and one to fill, as long as the slower stage (2 + 20 · 0.1).
    assert seconds(model, GridCandidate(1, 2, 2), fast, [20, 20]) == pytest.approx(3 * 4)
    # Graph-parallel workers wait for the larger of their chunks.
    assert seconds(model, GridCandidate(2, 1, 2), fast, [20, 20]) == pytest.approx(7)
    assert seconds(model, GridCandidate(2, 1, 2), fast, [10, 30]) == pytest.approx(7 * 30 / 20)
    # Halo rows are sent between computations, rows between stages beside them.
    halo, slow = GridCandidate(2, 1, 2, (20, 20)), ClusterProfile(40.0)
    assert seconds(model, halo, slow, [20, 20]) == pytest.approx(7 + (20 * 4 + 20 * 8) / 2 / 40.0)
    assert seconds(model, GridCandidate(1, 2, 2), slow, [20, 20]) == pytest.approx(3 * 4)
    assert seconds(model, GridCandidate(1, 2, 2), ClusterProfile(4.0), [20, 20]) == pytest.approx(3 * 10 * 16 / 4)
    # Each of three exchanges of a chunk costs a message to every other worker.
    late = ClusterProfile(1e18, latency=0.5)
    assert seconds(model, halo, late, [20, 20]) == pytest.approx(7 + 3 * 0.5)


def test_workers_that_share_cores_take_as_long_as_their_total_work() -> None:
    model, grid = ModelCost((LAYER,) * 8, {}), GridCandidate(1, 4, 16)
    slot = 2 * LAYER.seconds(1000)
    assert seconds(model, grid, ClusterProfile(), equal_loads(16, 16_000)) == pytest.approx(19 * slot)
    assert seconds(model, grid, ClusterProfile(oversubscription=2.0), equal_loads(16, 16_000)) == pytest.approx(
        32 * slot
    )
    alone = ModelCost((LAYER,) * 8, {}, speedup_alone=2.0)
    assert seconds(alone, GridCandidate(1, 1, 1), ClusterProfile(oversubscription=2.0), [1000]) == pytest.approx(
        8 * LAYER.seconds(1000) / 2
    )


def test_threads_per_core_and_threads_of_a_worker_while_others_wait() -> None:
    shares = [CpuShare(2, 1, 4), CpuShare(2, 1, 2), CpuShare(8, 2, 4), CpuShare(8, 2, 8), CpuShare(2, 4, 4)]
    assert [share.oversubscription for share in shares] == [2.0, 1.0, 1.0, 1.0, 2.0]
    assert [share.threads_alone for share in shares] == [2, 2, 4, 8, 4]


def test_chunk_loads_count_every_row_and_edge() -> None:
    graph = communities(120)
    (edges,) = graph.edges.values()
    layout = build_chunk_layout(graph, 2, 6)
    chunks = [chunk for number in range(2) for chunk in ChunkedPartition(graph, layout, number).chunks]
    assert chunk_loads(graph, layout) == [chunk_load(chunk) for chunk in chunks]
    assert sum(chunk_loads(graph, layout)) == 120 + edges.count


def test_aggregates_of_many_relations_are_cached_only_on_request() -> None:
    cases: list[tuple[int, Any, bool]] = [(8, "auto", True), (9, "auto", False), (9, True, True), (1, False, False)]
    for relations, option, cached in cases:
        task = SimpleNamespace(masks_edges=False)
        graph, model = SimpleNamespace(nodes=range(1), edges=range(relations)), SimpleNamespace(is_precomputed=False)
        job: Any = SimpleNamespace(graph=graph, task=task, model=model)
        assert should_cache_inputs(PipeConfig(cache_inputs=option), job) is cached


def test_bytes_of_gradient_sums() -> None:
    first, second = (LayerCost(0, 0, 0, 0, 0, 0, names) for names in (("a", "both"), ("b", "both")))
    model = ModelCost((first, second), {"a": 10, "b": 20, "both": 100, "head": 1000})
    two = [range(1), range(1, 2)]
    assert model.owners(two) == {"a": [0], "b": [1], "both": [0, 1], "head": [1]}
    assert model.allreduce_bytes(GridCandidate(1, 2, 8), two) == 2 * 100
    assert model.allreduce_bytes(GridCandidate(3, 2, 6), two) == 3 * (10 + 20 + 200 + 1000) + 6 * 100
    assert model.allreduce_bytes(GridCandidate(3, 1, 3), [range(2)]) == 3 * 1130


# -- profiles --


def profile_gcn2(world: World) -> ModelCost:
    graph = communities(240)
    config = resolve(
        {"model": {"name": "gcn2", "hidden": 8, "layers": 4, "norm": "batch"}, "strategy": {"name": "pipe"}}
    )
    job = make_job(validate(graph, config), config, RankContext(world))
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    assert isinstance(config.strategy, PipeConfig)
    cost = profile_model(config.strategy, job, build_chunk_layout(graph, 1, 6), CpuShare.detect(world))
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())
    assert all(weight.grad is None for weight in job.model.parameters()) and job.model.training
    return cost


def test_all_ranks_plan_with_the_profile_of_the_first(pool: RankPool) -> None:
    first, second = pool.run(2, profile_gcn2)
    assert first == second and len(first.layers) == 4
    used = {name for layer in first.layers for name in layer.parameters}
    assert used and used <= set(first.parameter_bytes)
    assert all(layer.seconds(1000) > 0 and layer.output_bytes == 2 * 8 * 4 for layer in first.layers[:-1])


def test_layer_costs_are_a_fixed_time_and_a_time_per_row_and_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_layers(config: Any, job: Any, chunk: Any) -> list[LayerCost]:
        seconds = (3.0 + 0.01 * chunk_load(chunk)) / torch.get_num_threads()
        return [LayerCost(seconds, 0.0, 1, 1, 1, 1, ("weight",))] * 4

    monkeypatch.setattr(profile, "_time_layers", time_layers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(CpuShare, "detect", lambda world: CpuShare(2, 1, 2))
    try:
        cost = profile_gcn2(World())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert [layer.seconds(1000) for layer in cost.layers] == pytest.approx([13.0] * 4, rel=0.05)
    assert cost.speedup_alone == pytest.approx(2.0)


def profile_links(world: World) -> ClusterProfile:
    return profile_cluster(world.uncounted(), CpuShare(1, 1, 1))


def test_bandwidth_and_latency_are_the_same_on_all_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, profile_links)
    assert first == second and first.bandwidth > 0 and first.latency > 0
