"""Sampled blocks contain the drawn edges; with all neighbours, outputs and gradients equal those of the whole graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EDGE, EdgeType, Graph
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.ops.draws import DrawKey
from tests.graph.strategies import graphs, sample_blocks

KEY = DrawKey(3, 1, 4)


def some_seeds(graph: Graph, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        kind: torch.randperm(table.count, generator=random)[: (table.count + 1) // 2]
        for kind, table in graph.nodes.items()
    }


@given(graph=graphs(), seed=st.integers(0, 99), count=st.integers(-1, 4), replace=st.booleans())
@settings(max_examples=80, deadline=None)
def test_blocks_contain_the_drawn_edges_and_their_data(graph: Graph, seed: int, count: int, replace: bool) -> None:
    seeds = some_seeds(graph, seed)
    views = sample_blocks(graph, seeds, [count, 2], KEY, replace=replace)
    assert len(views) == 2
    for kind in graph.nodes:
        assert torch.equal(views[1].nodes[kind].node_ids[: len(seeds[kind])], seeds[kind])
        assert views[1].nodes[kind].num_dst == len(seeds[kind])
        assert views[0].nodes[kind].num_dst == len(views[1].nodes[kind].node_ids)
        for view in views:
            ids, num_dst = view.nodes[kind].node_ids, view.nodes[kind].num_dst
            assert len(ids.unique()) == len(ids) and bool((ids[num_dst:].diff() > 0).all())
        inner, outer = views[1].nodes[kind].node_ids, views[0].nodes[kind].node_ids
        assert torch.equal(outer[: len(inner)], inner), "destinations are the next view's sources, in order"
    for view, fanout in zip(views, [2, count], strict=True):
        for kind, edges in graph.edges.items():
            relation, (src, dst) = view.relations[kind], edges.edge_index()
            structure = relation.structure
            structure.check()
            assert torch.equal(view.nodes[kind.src].node_ids[structure.col.long()], src[relation.edge_ids])
            assert torch.equal(view.nodes[kind.dst].node_ids[structure.row.long()], dst[relation.edge_ids])
            degree = edges.in_degree()[view.nodes[kind.dst].node_ids[: structure.num_rows]]
            expected = degree if fanout < 0 else (degree > 0) * fanout if replace else degree.clamp(max=fanout)
            assert torch.equal(structure.indptr.diff(), expected)
            for name in ("weight", "attr"):
                sampled, column = getattr(relation, name), getattr(edges, name)
                assert (sampled is None) == (column is None)
                assert sampled is None or torch.equal(sampled, column[relation.edge_ids])
        full_view = LocalView.of_graph(graph)
        for kind, rows in view.nodes.items():
            assert torch.equal(rows.degree(False), full_view.nodes[kind].degree(False)[rows.node_ids])


def test_a_node_draws_the_same_in_any_batch() -> None:
    graph = make_dataset("communities", nodes=500, mean_degree=20, seed=2)
    sampler = NeighborSampler(graph, [3, 4])
    all_nodes = sampler.blocks({"node": torch.arange(500)}, KEY)[-1]
    drawn = all_nodes.edge_ids.split(all_nodes.in_degree.tolist())
    for seed in range(3):
        seeds = torch.randperm(500, generator=torch.Generator().manual_seed(seed))[:50]
        view = sampler.blocks({"node": seeds}, KEY)[-1]
        assert torch.equal(view.edge_ids, torch.cat([drawn[node] for node in seeds.tolist()]))
    other = sampler.blocks({"node": torch.arange(500)}, DrawKey(3, 1, 5))[-1]
    assert not torch.equal(other.edge_ids, all_nodes.edge_ids)


def test_weighted_draws_never_take_edges_of_weight_zero() -> None:
    graph = Graph(
        torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5, edge_weight=torch.tensor([0.0, 1.0, 0.0, 2.0])
    )
    seeds = {"node": torch.tensor([0])}
    assert sample_blocks(graph, seeds, [3], KEY, weighted=True)[0].edge_ids.tolist() == [1, 3]
    assert len(sample_blocks(graph, seeds, [3], KEY)[0].edge_ids) == 3
    assert sample_blocks(graph, seeds, [-1], KEY, weighted=True)[0].edge_ids.tolist() == [0, 1, 2, 3]
    negative = Graph(torch.tensor([[1], [0]]), edge_weight=torch.tensor([-1.0]))
    with pytest.raises(ConfigError, match="finite weights that are not negative"):
        NeighborSampler(negative, [3], weighted=True)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_sums_estimate_all_neighbours_without_bias(plain: Graph, replace: bool, loops: bool) -> None:
    sampler, seeds, times = NeighborSampler(plain, [3], replace=replace), torch.arange(0, 300, 10), 500
    x = torch.randn(300, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = plain.single_edges.weight
    assert weight is not None
    weight = weight.double()
    expected = LocalView.of_graph(plain).aggregate(x, weight=weight, self_loops=loops)[seeds]
    estimates = []
    for step in range(times):
        (view,) = sampler.blocks({"node": seeds}, DrawKey(0, 0, step))
        estimates.append(view.aggregate(x[view.node_ids], weight=weight[view.edge_ids], self_loops=loops))
    sums = torch.stack(estimates)
    error = sums.std(0) / times**0.5
    assert bool(((sums.mean(0) - expected).abs() <= 5 * error + 1e-12).all())
    (view,) = sampler.blocks({"node": seeds}, DrawKey(0, 0, 0))
    ones = view.aggregate(torch.ones(view.num_src, 1))
    assert torch.allclose(ones[:, 0], plain.single_edges.in_degree()[seeds].float()), (
        "the number of neighbours is exact"
    )


def test_fanouts_may_differ_by_edge_type() -> None:
    graph = make_dataset("shop", seed=1, users=60, products=40, brands=5, buys=400, views=600)
    fanouts = {kind: [hop + 1, 0] for hop, kind in enumerate(graph.edges)}
    views = sample_blocks(graph, {"product": torch.arange(40)}, fanouts, KEY)
    for kind in graph.edges:
        counts = views[1].relations[kind].structure.indptr.diff()
        assert not len(counts) or int(counts.max()) <= fanouts[kind][0]
        assert views[0].relations[kind].structure.num_edges == 0
    wrong: list[Any] = [[], [-2], [1.5], {EdgeType("a", "b", "c"): [1]}, {**fanouts, next(iter(fanouts)): [1]}]
    for wrong_fanouts in wrong:
        with pytest.raises(ConfigError, match="fanout"):
            NeighborSampler(graph, wrong_fanouts)
    with pytest.raises(ConfigError, match="no nodes of type"):
        sample_blocks(graph, {"shop": torch.arange(2)}, [1], KEY)


def test_wrong_seeds_leave_a_sampler_usable() -> None:
    graph = make_dataset("communities", nodes=50, mean_degree=5, seed=2)
    sampler = NeighborSampler(graph, [2, 2])
    for seeds in ([1, 1], [50]):
        with pytest.raises(InputError, match="different store ids"):
            sampler.blocks({"node": torch.tensor(seeds)}, KEY)
    fresh = sample_blocks(graph, {"node": torch.tensor([1, 2])}, [2, 2], KEY)
    again = sampler.blocks({"node": torch.tensor([1, 2])}, KEY)
    assert all(torch.equal(a.edge_ids, b.edge_ids) for a, b in zip(fresh, again, strict=True))


MODELS = [
    {"name": "sage"},
    {"name": "sage", "aggr": "max"},
    {"name": "gcn", "input_dropout": 0.2, "edge_weight": True},
    {"name": "gat", "heads": 2},
    {"name": "gatv2", "heads": 2},
    {"name": "gin"},
    {"name": "gcn2"},
    {"name": "res+", "norm": "layer"},
    {"name": "sage", "embedding": 4},
    {"name": "rgcn"},
]


@pytest.fixture(scope="module")
def plain() -> Graph:
    graph = make_dataset("communities", nodes=300, mean_degree=6, seed=3)
    nodes, index = graph.single_nodes, graph.single_edges.edge_index()
    index = torch.cat([index, index[:, :40], torch.tensor([[7, 9], [7, 9]])], 1)  # parallel edges and self-loops
    weight = torch.rand(index.shape[1], generator=torch.Generator().manual_seed(1))
    assert nodes.x is not None
    return Graph(index, x=nodes.x, y=nodes.y, split=nodes.split, edge_weight=weight)


def results(model: GNN, views: Any, x: Any, rows: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    out = model(views, x)[rows]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


Results = tuple[Tensor, dict[str, Tensor | None]]


def assert_same(actual: Results, expected: Results) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-12)
    for name, gradient in actual[1].items():
        torch.testing.assert_close(
            gradient, expected[1][name], rtol=1e-10, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("settings", MODELS, ids=lambda m: "-".join(map(str, m.values())))
def test_with_all_neighbours_a_model_equals_itself_on_the_whole_graph(plain: Graph, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"hidden": 8, "layers": 3, "dropout": 0.3, **settings})
    model = build_model(config, plain).double()
    x = plain.single_nodes.x
    assert x is not None
    x = x.double()
    full_view = LocalView.of_graph(plain).with_step(key=KEY)
    for seeds in (torch.arange(300), torch.randperm(300, generator=torch.Generator().manual_seed(1))[:20]):
        views = sample_blocks(plain, {"node": seeds}, [-1, -1, -1], KEY)
        expected = results(model, full_view, x, seeds)
        assert_same(results(model, views, x[views[0].node_ids], torch.arange(len(seeds))), expected)


def test_with_all_neighbours_a_heterogeneous_model_equals_itself_on_the_whole_graph() -> None:
    graph = make_dataset("shop", seed=1, users=120, products=80, brands=5, buys=700, views=900)
    target = graph.labelled_type
    assert target is not None
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"name": "rgcn", "hidden": 8, "layers": 2, "dropout": 0.3})
    model = build_model(config, graph).double()
    x = {kind: table.x.double() for kind, table in graph.nodes.items() if table.x is not None}
    seeds = torch.randperm(graph.nodes[target].count, generator=torch.Generator().manual_seed(1))[:15]
    views = sample_blocks(graph, {target: seeds}, [-1, -1], KEY)
    sampled_x = {kind: rows[views[0].nodes[kind].node_ids] for kind, rows in x.items()}
    expected = results(model, LocalView.of_graph(graph).with_step(key=KEY), x, seeds)
    assert_same(results(model, views, sampled_x, torch.arange(15)), expected)


def test_gather_rows_looks_up_store_ids(plain: Graph) -> None:
    view = sample_blocks(plain, {"node": torch.tensor([40, 7, 200])}, [3, 3], KEY)[0]
    x = torch.randn(view.num_src, 2)
    ids = view.node_ids[torch.tensor([2, 0, 2, view.num_src - 1])]
    assert torch.equal(view.gather_rows(x, ids), x[[2, 0, 2, view.num_src - 1]])
    absent = next(node for node in range(300) if node not in view.node_ids)
    with pytest.raises(InputError, match="is not in this view"):
        view.gather_rows(x, torch.tensor([7, absent]))


def test_isolated_seeds_and_graphs_without_edges() -> None:
    graph = Graph(torch.empty(2, 0), x=torch.randn(4, 3), y=torch.tensor([0, 1, 0, 1]))
    views = sample_blocks(graph, {"node": torch.tensor([2, 0])}, [5, 5], KEY)
    assert views[0].node_ids.tolist() == [2, 0] and views[0].relations[EDGE].structure.num_edges == 0
    model = build_model(ModelConfig.model_validate({"name": "gcn", "layers": 2, "hidden": 4}), graph)
    assert model(views, torch.randn(2, 3)).shape == (2, 2)
    empty = sample_blocks(graph, {}, [5, 5], KEY)
    assert model(empty, torch.randn(0, 3)).shape == (0, 2)


def test_an_edge_drawn_twice_gets_the_gradient_of_a_maximum_once() -> None:
    """Both draws have one store edge id and equal messages."""
    graph = Graph(torch.tensor([[1, 2], [0, 0]]), num_nodes=3)
    (view,) = sample_blocks(graph, {"node": torch.tensor([0])}, [5], KEY, replace=True)
    assert len(view.edge_ids) == 5
    for verb in (
        lambda x: view.aggregate(x, reduce="max"),
        lambda x: view.aggregate(x, reduce="max", self_loops=True),
        lambda x: view.propagate(lambda src, dst, edge: src["x"], src={"x": x}, reduce="max"),
    ):
        x = torch.zeros(view.num_src, 2, requires_grad=True)
        verb(x).sum().backward()
        assert x.grad is not None and x.grad.sum(0).tolist() == [1, 1]
