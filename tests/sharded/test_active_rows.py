"""Layers that compute only active rows: the same losses and weights as local, fewer rows, fewer bytes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.sharded.full_batch.active_rows import ActiveRows
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph
from tests.equivalence.test_sar import check_close, fit, join_sharded, run_settings
from tests.ranks import RankPool

NODES, LAYERS = 150, 3
MODELS: list[dict[str, Any]] = [
    {"name": "sage"},
    {"name": "sage", "aggr": "max", "input_dropout": 0.3},
    {"name": "sage", "embedding": 3},
    {"name": "gcn", "norm": "layer"},
    {"name": "gcn", "norm": "batch"},  # looks at all rows
    {"name": "gat", "heads": 2, "edge_features": False},
    {"name": "gat", "heads": 2, "edge_features": True},
    {"name": "gatv2", "heads": 2},
    {"name": "gin"},
    {"name": "gcn2", "layers": 16},
    {"name": "res+", "layers": 4},
]


def split_of(count: int, trained_on: list[int]) -> torch.Tensor:
    split = torch.full((count,), 1)
    split[::2] = 2
    split[trained_on] = 0
    return split


def chain() -> Graph:
    """Nodes in a row with edges over short distances, self-loops and parallel edges; few of them are trained on."""
    random = torch.Generator().manual_seed(4)
    src = torch.arange(NODES).repeat(3)
    dst = (src + torch.randint(-2, 3, (len(src),), generator=random)).clamp(0, NODES - 1)
    count = len(src)
    return Graph(
        torch.stack([src, dst]),
        x=torch.randn(NODES, 5, generator=random),
        y=torch.randint(0, 3, (NODES,), generator=random),
        split=split_of(NODES, [7, 60, 61]),
        edge_weight=torch.rand(count, generator=random) + 0.1,
        edge_attr=torch.randn(count, 3, generator=random),
        num_nodes=NODES,
    )


def typed_chain() -> Graph:
    """Two node types; the second is read, never trained on."""
    random = torch.Generator().manual_seed(5)
    counts = {"a": 90, "b": 60}
    nodes = {
        node_type: validated_nodes(
            count,
            x=torch.randn(count, 4, generator=random),
            y=torch.randint(0, 3, (count,), generator=random) if node_type == "a" else None,
            split=split_of(count, [10, 50]) if node_type == "a" else None,
        )
        for node_type, count in counts.items()
    }
    edges = {}
    for src, name, dst in (("a", "to", "b"), ("b", "of", "a"), ("a", "next", "a")):
        start = torch.arange(counts[src]).repeat(2)
        shift = torch.randint(-2, 3, (len(start),), generator=random)
        end = (start * counts[dst] // counts[src] + shift).clamp(0, counts[dst] - 1)
        edges[EdgeType(src, name, dst)] = validated_edges(
            torch.stack([start, end]), num_src=counts[src], num_dst=counts[dst]
        )
    return Graph.of(nodes, edges)


HETERO: list[dict[str, Any]] = [{"name": "hetero-sage"}, {"name": "hgt", "heads": 2}]
GRAPHS = {"chain": (chain, MODELS), "typed": (typed_chain, [{"name": "rgcn"}, {"name": "rgcn", "bases": 2}, *HETERO])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("active-rows")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [fit(open_store(folder / name), run_settings(model, name="local", order="store")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def every_model(world: World, store: str, parts: str, name: str, restrict_rows: bool) -> list[dict[str, Any]]:
    runs = []
    for model in GRAPHS[name][1]:
        before = world.traffic.bytes_sent
        context = RankContext(world, Partition.open(parts).shard(world.rank))
        settings = run_settings(model, name="sar", restrict_rows=restrict_rows)
        runs.append(fit(open_store(store), settings, context) | {"bytes": world.traffic.bytes_sent - before})
    return runs


@pytest.mark.parametrize(
    ("name", "size", "method"),
    [("chain", 1, "random"), ("chain", 2, "range"), ("chain", 3, "random"), ("typed", 3, "random")],
)
def test_training_on_active_rows_equals_local(
    pool: RankPool, folder: Path, expected: Any, name: str, size: int, method: str
) -> None:
    parts = folder / f"{name}-{size}-{method}"
    cut_graph(open_store(folder / name), size, method, parts)
    ranks = pool.run(size, every_model, str(folder / name), str(parts), name, True)
    for index, model in enumerate(GRAPHS[name][1]):
        run = join_sharded([runs[index] for runs in ranks])
        run.pop("bytes")
        check_close(run, join_sharded([expected[name][index]]), f"{model}")


def test_fewer_bytes_are_sent_with_active_rows(pool: RankPool, folder: Path) -> None:
    parts = folder / "chain-2-travel"
    cut_graph(open_store(folder / "chain"), 2, "random", parts)
    restricted, unrestricted = (
        pool.run(2, every_model, str(folder / "chain"), str(parts), "chain", restrict) for restrict in (True, False)
    )
    for index, model in enumerate(MODELS):
        fewer, full = (sum(runs[index]["bytes"] for runs in ranks) for ranks in (restricted, unrestricted))
        if model.get("norm") == "batch":
            assert fewer == full
        else:  # evaluation reads the whole graph either way, so only steps save
            assert fewer < 0.8 * full, model


def levels(world: World, parts: str, layers: int) -> list[list[int]]:
    """The store ids that each level has on this rank."""
    shard = Partition.open(parts).shard(world.rank)
    ids = shard.nodes("node").store_ids
    loss_rows = {"node": torch.isin(ids, torch.tensor([7, 60, 61]))}
    active_rows = ActiveRows.compute(shard, RingExchange(world), loss_rows, layers)
    assert active_rows is not None
    return [ids[mask["node"]].tolist() for mask in active_rows.levels]


@pytest.mark.parametrize("size", [1, 3])
def test_levels_are_the_neighbourhoods_of_the_loss_rows(pool: RankPool, folder: Path, size: int) -> None:
    graph = chain()
    edges = graph.single_edges
    parts = folder / f"levels-{size}"
    cut_graph(graph, size, "random", parts)
    ranks = pool.run(size, levels, str(parts), LAYERS)
    expected = {7, 60, 61}
    for level in range(LAYERS, -1, -1):
        assert sorted(node for rank in ranks for node in rank[level]) == sorted(expected)
        expected |= {int(s) for s, d in zip(edges.src.tolist(), edges.dst().tolist(), strict=True) if d in expected}


def sizes(world: World, store: str, parts: str) -> list[tuple[int, int]]:
    context = RankContext(world, Partition.open(parts).shard(world.rank))
    strategy: Any = build(
        open_store(store), resolve(run_settings({"name": "sage"}, name="sar")), context=context
    ).strategy
    return [(view.num_src, view.num_dst) for view in strategy._views]


def test_sources_of_a_layer_are_the_destinations_of_the_layer_before(pool: RankPool, folder: Path) -> None:
    parts = folder / "sizes"
    cut_graph(open_store(folder / "chain"), 2, "random", parts)
    ranks = pool.run(2, sizes, str(folder / "chain"), str(parts))
    totals = [tuple(sum(layers[layer][end] for layers in ranks) for end in (0, 1)) for layer in range(LAYERS)]
    assert totals[-1][1] == 3 and all(after[0] == before[1] for before, after in pairwise(totals))
    assert totals[0][0] < NODES / 2


def test_without_a_restriction_if_the_loss_needs_most_rows(pool: RankPool, folder: Path) -> None:
    everything = {"node": torch.ones(NODES, dtype=torch.bool)}
    parts = folder / "everything"
    cut_graph(open_store(folder / "chain"), 1, "random", parts)
    assert ActiveRows.compute(Partition.open(parts).shard(0), RingExchange(World()), everything, 2) is None
