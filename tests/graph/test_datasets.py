"""Generated graphs have the properties that their parameters set; equal seeds give equal bits."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import DATASETS, make_dataset
from gnnfleet.graph.datasets.base import prefixed_ids
from gnnfleet.graph.datasets.events import INTERACTS
from gnnfleet.graph.datasets.shop import BUYS, MADE_BY, REVERSE, VIEWS
from gnnfleet.graph.graph import Graph, validated_edges
from gnnfleet.graph.store import EDGE_ARRAYS, NODE_ARRAYS, open_store, save_store

SMALL = {
    "communities": {"nodes": 2000, "features": 8},
    "rmat": {"scale": 10, "features": 3, "classes": 4, "symmetric": True},
    "shop": {
        "users": 500,
        "products": 200,
        "brands": 20,
        "buys": 3000,
        "views": 5000,
        "user_features": 3,
        "labels": "both",
    },
    "events": {"users": 200, "items": 100, "events": 5000},
}


def tensors(graph: Graph) -> dict[str, torch.Tensor]:
    arrays = {f"{kind}/{name}": getattr(nodes, name) for kind, nodes in graph.nodes.items() for name in NODE_ARRAYS}
    arrays |= {f"{kind}/{name}": getattr(edges, name) for kind, edges in graph.edges.items() for name in EDGE_ARRAYS}
    return {name: tensor for name, tensor in arrays.items() if tensor is not None}


def same(first: Graph, second: Graph) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", SMALL)
def test_a_graph_depends_on_its_seed_alone(name, tmp_path):
    first = make_dataset(name, **SMALL[name])
    assert same(first, make_dataset(name, **SMALL[name]))
    other = tensors(make_dataset(name, **SMALL[name], seed=1))
    differ = [key for key, tensor in tensors(first).items() if not torch.equal(tensor, other.get(key, torch.empty(0)))]
    assert len(differ) >= len(tensors(first)) - 1  # a shop's "made_by" rows start the same for every seed
    assert same(first, save_store(first, tmp_path / "g"))
    assert same(first, open_store(tmp_path / "g"))


@pytest.mark.parametrize("name", SMALL)
def test_the_number_of_threads_has_no_influence(name):
    before = torch.get_num_threads()
    made_graphs = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        # Larger than torch's grain, so that torch's own loops are split as well.
        made_graphs.append(
            make_dataset(name, **{**SMALL[name], **({"nodes": 40_000} if name == "communities" else {})})
        )
    torch.set_num_threads(before)
    assert same(made_graphs[0], made_graphs[1]) and same(made_graphs[0], made_graphs[2])


def assert_simple(graph: Graph, *, symmetric: bool) -> None:
    src, dst = graph.single_edges.edge_index()
    assert not bool((src == dst).any())
    keys = dst * graph.num_nodes + src
    assert bool((keys.diff() > 0).all())  # in store order and without repeats
    if symmetric:
        assert torch.equal(keys, (src * graph.num_nodes + dst).sort().values)


def tail_exponent(degrees: torch.Tensor, lowest: int) -> float:
    """Maximum likelihood over degrees ≥ lowest (Clauset et al. 2009, discrete approximation)."""
    tail = degrees[degrees >= lowest].double()
    return 1 + len(tail) / float((tail / (lowest - 0.5)).log().sum())


@pytest.mark.parametrize("homophily", [0.0, 0.35, 0.9])
def test_communities_have_the_configured_homophily_and_edges(homophily):
    graph = make_dataset("communities", nodes=5000, edges=60_000, classes=7, homophily=homophily, features=0)
    assert_simple(graph, symmetric=True)
    assert graph.num_edges == 60_000 and graph.undirected and graph.single_nodes.x is None
    src, dst = graph.single_edges.edge_index()
    y = graph.single_nodes.y
    assert y is not None and sorted(set(y.tolist())) == list(range(7))
    assert float((y[src] == y[dst]).double().mean()) == pytest.approx(homophily, abs=1e-4)


@pytest.mark.parametrize("exponent", [2.2, 3.0])
def test_communities_degrees_have_a_power_law_tail(exponent):
    graph = make_dataset("communities", nodes=50_000, mean_degree=20, exponent=exponent, homophily=0.5, features=0)
    degrees = graph.single_edges.in_degree()
    assert float(degrees.double().mean()) == pytest.approx(20, abs=0.01)
    assert tail_exponent(degrees, 40) == pytest.approx(exponent, abs=0.35)
    assert int(degrees.max()) > 20 * 20


def nearest_mean_accuracy(x: torch.Tensor, graph: Graph) -> float:
    nodes = graph.single_nodes
    assert nodes.y is not None
    train, test = nodes.mask("train"), nodes.mask("test")
    means = torch.stack([x[train & (nodes.y == label)].mean(0) for label in range(nodes.num_classes)])
    return float((torch.cdist(x[test], means).argmin(1) == nodes.y[test]).double().mean())


def neighbour_means(graph: Graph) -> torch.Tensor:
    src, dst = graph.single_edges.edge_index()
    x = graph.single_nodes.x
    assert x is not None
    return torch.zeros_like(x).index_add_(0, dst, x[src]) / graph.single_edges.in_degree().clamp(min=1)[:, None]


def test_communities_neighbours_predict_the_class_better_than_features():
    graph = make_dataset("communities", nodes=10_000)
    x = graph.single_nodes.x
    assert x is not None
    by_node = nearest_mean_accuracy(x, graph)
    assert 0.25 < by_node < 0.8  # chance is 0.1, or the share of the largest class
    assert nearest_mean_accuracy(x + 3 * neighbour_means(graph), graph) > by_node + 0.15
    noise = make_dataset("communities", nodes=10_000, signal=0.0)
    assert noise.single_nodes.x is not None
    assert nearest_mean_accuracy(noise.single_nodes.x, noise) < 0.2


def test_communities_have_power_law_sizes_permuted_ids_and_exact_splits():
    graph = make_dataset(
        "communities", nodes=20_000, classes=50, communities=50, train=0.25, val=0.05, dtype="bfloat16"
    )
    nodes = graph.single_nodes
    assert nodes.x is not None and nodes.y is not None and nodes.x.dtype == torch.bfloat16
    sizes = torch.bincount(nodes.y)
    assert int(sizes.max()) > 4 * int(sizes.double().median())
    assert float((nodes.y[1:] == nodes.y[:-1]).double().mean()) < 0.2
    assert [int(nodes.mask(split).sum()) for split in ("train", "val", "test")] == [5000, 1000, 14_000]


def test_rmat_degrees_are_skewed_and_edges_are_distinct_unless_repeats_are_set():
    directed = make_dataset("rmat", nodes=3000, edges=30_000)
    assert_simple(directed, symmetric=False)
    assert directed.num_nodes == 3000 and directed.num_edges == 30_000 and not directed.undirected
    degrees = directed.single_edges.in_degree()
    assert int(degrees.max()) > 15 * 10 and int((degrees == 0).sum()) > 300
    assert float(degrees.sort(descending=True).values[:30].double().sum()) > 0.1 * 30_000
    # Ids are permuted: low ids do not have high degrees.
    assert float(degrees[:300].double().mean()) < 3 * 10
    symmetric = make_dataset("rmat", scale=11, edge_factor=8, symmetric=True, classes=3, features=2)
    assert_simple(symmetric, symmetric=True)
    assert symmetric.num_edges == 8 * 2048 and symmetric.undirected and symmetric.single_nodes.num_classes == 3
    raw = make_dataset("rmat", scale=8, edge_factor=16, repeats=True)
    src, dst = raw.single_edges.edge_index()
    assert raw.num_edges == 16 * 256 and bool((src == dst).any()) and len(torch.unique(src * 256 + dst)) < 16 * 256


def test_shop_has_types_ids_times_and_weights():
    graph = make_dataset("shop", users=3000, products=600, brands=40, buys=20_000, views=30_000, user_features=4)
    assert set(graph.edges) == {BUYS, VIEWS, MADE_BY, *REVERSE.values()}
    assert graph.nodes["user"].ids.select([0, 123]).to_pylist() == ["user-000000", "user-000123"]
    assert graph.nodes["brand"].x is None and graph.nodes["user"].y is None and graph.nodes["product"].split is not None
    buys, views, made_by = graph.edges[BUYS], graph.edges[VIEWS], graph.edges[MADE_BY]
    assert buys.count == 20_000 and buys.time is not None and int(buys.time.min()) >= 0 and buys.order is not None
    assert int(buys.time.max()) < 365 * 86_400
    assert views.weight is not None and float(views.weight.sum()) == 30_000 and views.count < 30_000
    assert sorted(made_by.src.tolist()) == list(range(600))
    for kind, reverse in REVERSE.items():
        pairs, flipped = graph.edges[kind].edge_index(), graph.edges[reverse].edge_index().flip(0)
        assert sorted(pairs.T.tolist()) == sorted(flipped.T.tolist())
    assert len(make_dataset("shop", reverse=False).edges) == 3


def test_shop_buyers_and_brands_follow_categories_at_the_configured_rates():
    graph = make_dataset("shop", labels="both", taste=0.9, loyalty=0.9)
    favourite, category = graph.nodes["user"].y, graph.nodes["product"].y
    assert favourite is not None and category is not None and graph.nodes["product"].classes[3] == "category-3"
    user, product = graph.edges[BUYS].edge_index()
    assert float((favourite[user] == category[product]).double().mean()) == pytest.approx(0.9 + 0.1 / 8, abs=0.04)
    product, brand = graph.edges[MADE_BY].edge_index()
    assert float((category[product] == brand % 8).double().mean()) == pytest.approx(0.9 + 0.1 / 8, abs=0.04)


def item_popularity_by_quarter(graph: Graph) -> list[torch.Tensor]:
    edges = graph.edges[INTERACTS]
    assert edges.order is not None
    counts = [torch.bincount(dst, minlength=edges.num_dst) for dst in edges.dst().long()[edges.order].chunk(4)]
    return [torch.log1p(count.double()) for count in counts]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_events_popularity_drifts():
    def correlations(drift: float) -> tuple[float, float]:
        quarters = item_popularity_by_quarter(make_dataset("events", events=80_000, drift=drift, repeat=0.2))
        adjacent = min(correlation(quarters[i], quarters[i + 1]) for i in range(3))
        return adjacent, correlation(quarters[0], quarters[3])

    adjacent, distant = correlations(0.9)
    assert distant < adjacent - 0.2
    adjacent, distant = correlations(0.0)
    assert distant > adjacent - 0.1


@pytest.mark.parametrize("repeat", [0.0, 0.6])
def test_events_repeat_at_the_configured_rate(repeat):
    graph = make_dataset("events", users=300, items=20_000, events=60_000, repeat=repeat, ties=0.1, taste=0.5)
    edges = graph.edges[INTERACTS]
    assert edges.order is not None and edges.time is not None and edges.attr is not None
    time = edges.time[edges.order]
    assert bool((time.diff() >= 0).all()) and time.dtype == torch.int64
    assert float((time.diff() == 0).double().mean()) == pytest.approx(0.1, abs=0.01)
    gaps = time.diff()
    assert float(gaps[gaps > 0].double().mean()) == pytest.approx(10, rel=0.05)
    last: dict[int, int] = {}
    repeats = 0
    for user, item in zip(edges.src[edges.order].tolist(), edges.dst()[edges.order].tolist(), strict=True):
        repeats += last.get(user) == item
        last[user] = item
    assert repeats / 60_000 == pytest.approx(repeat, abs=0.03)


def test_events_features_follow_items_and_users_are_split_by_first_event():
    graph = make_dataset("events", users=1000, events=20_000, signal=1.0)
    edges, users = graph.edges[INTERACTS], graph.nodes["user"]
    assert edges.attr is not None and edges.order is not None and users.y is not None
    dst = edges.dst().long()
    # Edge features of an item share a centre: the mean over half of its events predicts the other half's.
    busy = int(torch.bincount(dst).argmax())
    rows = edges.attr[dst == busy]
    assert correlation(rows[::2].mean(0).double(), rows[1::2].mean(0).double()) > 0.8
    first: dict[int, int] = {}
    for number, user in enumerate(edges.src[edges.order].tolist()):
        first.setdefault(user, number)
    assert torch.equal((users.y >= 0).nonzero().flatten(), torch.tensor(sorted(first)))
    last_train = max(first[int(u)] for u in users.mask("train").nonzero())
    assert last_train < min(first[int(u)] for u in users.mask("val").nonzero())
    assert int(users.mask("train").sum()) == round(0.7 * len(first))
    assert 0.7 < float((users.y == 1).sum() / len(first)) < 0.9


def test_events_taste_follows_the_users_topic():
    loyal = make_dataset("events", drift=0.0, taste=1.0, repeat=0.0, events=20_000, topics=4)
    src, dst = loyal.edges[INTERACTS].edge_index()
    counts = torch.zeros(2000, 1000).index_put_((src, dst), torch.tensor(1.0), accumulate=True)
    # Users of one taste share items, users of different tastes share none: items fall into four groups.
    connected = (counts.T @ counts) > 0
    group = torch.arange(1000)
    for _ in range(30):
        group = torch.where(connected, group[None, :], 1000).min(1).values.minimum(group)
    bought = counts.sum(0) > 0
    assert len(set(group[bought].tolist())) == 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("comunities", {}, "no dataset 'comunities': did you mean 'communities'"),
        ("xyz", {}, "choose one of communities, rmat, shop, events"),
        ("communities", {"node": 5}, "communities has no parameter 'node': did you mean 'nodes'"),
        ("communities", {"qqqq": 5}, "choose one of seed, train"),
        ("communities", {"nodes": "many"}, "communities: nodes: input should be a valid integer.*found 'many'"),
        ("communities", {"homophily": 1.5}, "homophily: input should be less than or equal to 1, found 1.5"),
        ("communities", {"edges": 10, "mean_degree": 3}, "edges and mean_degree exclude each other"),
        ("communities", {"classes": 9, "communities": 3}, "communities must be at least as many as classes, found 3"),
        ("communities", {"nodes": 20}, "nodes must be at least 3 per community"),
        ("communities", {"classes": 1}, "homophily must be 1"),
        ("communities", {"nodes": 100, "mean_degree": 90}, "communities have room for .* fewer edges"),
        ("communities", {"train": 0.8, "val": 0.3}, "train \\+ val must be at most 1"),
        ("communities", {"dtype": "int8"}, "dtype: input should be 'float32'"),
        ("rmat", {"a": 0.9}, "a \\+ b \\+ c must be at most 1"),
        ("rmat", {"nodes": 5, "scale": 3}, "nodes and scale exclude each other"),
        ("rmat", {"nodes": 10, "edges": 91}, "only .* of 91 different edges could be drawn"),
        ("events", {"items": 3}, "items must be at least as many as topics"),
        ("shop", {"users": 0}, "users: input should be greater than or equal to 1"),
    ],
)
def test_messages_name_the_wrong_parameter(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_dataset(name, **settings)


def test_extreme_parameters():
    complete = make_dataset("rmat", nodes=10, edges=90, a=0.25, b=0.25, c=0.25)
    assert_simple(complete, symmetric=False)
    assert make_dataset("communities", classes=1, homophily=1.0, nodes=300).num_edges == 6000
    assert make_dataset("communities", nodes=30, classes=2, edges=2).num_edges == 2
    assert make_dataset("events", events=0).num_edges == 0
    assert make_dataset("events", events=1, users=1, items=2, topics=2).num_edges == 1
    tiny = make_dataset("shop", users=1, products=1, brands=1, buys=0, views=3, categories=5)
    assert tiny.edges[VIEWS].count == 1 and tiny.edges[BUYS].count == 0


def test_prefixed_ids_are_padded_numbers():
    assert prefixed_ids("a", 0).values().to_pylist() == []
    ids = prefixed_ids("item", 1_000_001)
    assert ids.select([0, 999_999, 1_000_000]).to_pylist() == ["item-0000000", "item-0999999", "item-1000000"]
    assert ids.rows(["item-0000042"]).tolist() == [42]


def test_all_parameters_have_a_type_and_a_description():
    for dataset in DATASETS.values():
        for parameter in dataset.parameters:
            assert parameter["meaning"] and parameter["type"], (dataset.name, parameter["name"])


@pytest.mark.parametrize("times", [[0, 1, 1, 2, 5], [3, 1, 1, 0, 3], [7, 7, 7, 7, 7]])
def test_order_is_by_time_then_input(times):
    pairs = torch.tensor([[4, 3, 2, 1, 0], [1, 0, 1, 0, 1]])
    edges = validated_edges(pairs, num_src=5, num_dst=2, time=times)
    assert edges.order is not None
    stream = edges.edge_index()[:, edges.order]
    expected = sorted(range(5), key=lambda i: (times[i], i))
    assert torch.equal(stream, pairs[:, expected])
