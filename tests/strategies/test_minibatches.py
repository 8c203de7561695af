"""local on sampled blocks: with every neighbour it equals the whole graph; threads, caches and kills change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import run_training
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.training.build import build
from tests.graphs import assert_same_checkpoint


@pytest.fixture(scope="module")
def graph() -> Graph:
    made = make_dataset("communities", nodes=400, mean_degree=8, seed=3)
    weight = torch.rand(made.num_edges, generator=torch.Generator().manual_seed(1))
    nodes = made.single_nodes
    return Graph(made.single_edges.edge_index(), x=nodes.x, y=nodes.y, split=nodes.split, edge_weight=weight)


@pytest.fixture(scope="module")
def hetero() -> Graph:
    return make_dataset("shop", seed=1, users=300, products=200, brands=10, buys=2000, views=3000)


def tree(model: dict[str, Any], strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    model = {"hidden": 16, "layers": 3, "dropout": 0.4, **model}
    return {"model": model, "strategy": strategy, "precision": "float64", "seed": 5, "split": "0.6/0.2/0.2", **more}


def trained(graph: Graph, words: dict[str, Any], epochs: int = 2) -> tuple[Strategy, list[tuple[float, int]]]:
    strategy = build(graph, resolve(words)).strategy
    return strategy, [(record.loss, record.count) for epoch in range(epochs) for record in strategy.train_epoch(epoch)]


def weights(strategy: Strategy) -> dict[str, Tensor]:
    return dict(strategy.model.state_dict())


MODELS = [
    {"name": "sage"},
    {"name": "sage", "aggr": "max"},
    {"name": "gcn", "edge_weight": True},
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "gin"},
    {"name": "gat", "heads": 4},
    {"name": "gcn2"},
    {"name": "sage", "embedding": 8},
    {"name": "sage", "layers": 1},
    {"name": "rgcn"},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(map(str, m.values())))
@pytest.mark.parametrize("cache", [False, "auto"])
def test_every_neighbour_equals_the_whole_graph(graph: Graph, model: dict[str, Any], cache: Any) -> None:
    fanouts = [-1] * model.get("layers", 3)
    whole, losses = trained(graph, tree(model, {"batch": 100}))
    blocks, found = trained(graph, tree(model, {"batch": 100, "fanouts": fanouts, "cache_inputs": cache}))
    assert [count for _, count in found] == [count for _, count in losses] == [100, 100, 40] * 2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-10, atol=0)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(blocks)[name], tensor, rtol=1e-8, atol=1e-10, msg=name)
    expected = whole.evaluate("test")
    assert blocks.evaluate("test") == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(blocks.predict().logits, whole.predict().logits, rtol=1e-7, atol=1e-9)


def with_features(graph: Graph) -> Graph:
    """Features for every node type, of different widths."""
    random = torch.Generator().manual_seed(4)
    for width, (kind, nodes) in enumerate(graph.nodes.items(), start=3):
        graph = graph.with_nodes(kind, x=torch.randn(nodes.count, width, generator=random))
    return graph


@pytest.mark.parametrize("cache", [False, True, None])
def test_several_node_types(hetero: Graph, cache: bool | None) -> None:
    graph = hetero if cache is None else with_features(hetero)  # rows that are learnt cannot be kept
    words: dict[str, Any] = {} if cache is None else {"cache_inputs": cache}
    model = {"name": "rgcn", "layers": 2, "hidden": 8, "bases": 2}
    whole, losses = trained(graph, tree(model, {"batch": 50, "cache_inputs": False}))
    blocks, found = trained(graph, tree(model, {"batch": 50, "fanouts": [-1, -1], **words}))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-9, atol=0)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(blocks)[name], tensor, rtol=1e-8, atol=1e-10, msg=name)
    if cache:
        kept, again = trained(graph, tree(model, {"batch": 50, "cache_inputs": True}))
        torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=1e-9, atol=0)
        torch.testing.assert_close(kept.predict().logits, whole.predict().logits, rtol=1e-7, atol=1e-9)
    fanouts = {str(kind): [3, 2] for kind in graph.edges}
    _, found = trained(graph, tree(model, {"batch": 50, "fanouts": fanouts}), epochs=8)
    assert found[-1][0] < found[0][0]


@pytest.mark.parametrize("model", [{"name": "sage"}, {"name": "gat"}], ids=lambda m: m["name"])
@pytest.mark.parametrize("replace", [False, True])
def test_prefetch_changes_no_bit(graph: Graph, model: dict[str, Any], replace: bool) -> None:
    strategy = {"batch": 32, "fanouts": [4, 3, 2], "replace": replace}
    runs = [trained(graph, tree(model, {**strategy, "prefetch": depth}, precision="float32")) for depth in (0, 1, 2, 2)]
    for other, losses in runs[1:]:
        assert losses == runs[0][1]
        assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(runs[0][0]).items())


def test_the_cache_stands_for_all_neighbours_of_the_last_hop(graph: Graph) -> None:
    for name in ("sage", "gcn", "gin"):
        kept, losses = trained(graph, tree({"name": name}, {"batch": 64, "fanouts": [4, 3, 2]}))
        plain, found = trained(graph, tree({"name": name}, {"batch": 64, "fanouts": [4, 3, -1], "cache_inputs": False}))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-10, atol=0)
        for key, tensor in weights(plain).items():
            torch.testing.assert_close(weights(kept)[key], tensor, rtol=1e-8, atol=1e-10, msg=key)


def test_it_learns(graph: Graph) -> None:
    words = tree({"name": "sage", "dropout": 0.0}, {"batch": 64, "fanouts": [5, 5, 5]}, precision="float32")
    strategy, losses = trained(graph, words, epochs=15)
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert strategy.evaluate("test")["accuracy"] > 0.6


@pytest.mark.parametrize("split_at", [1, 3])
def test_a_resumed_run_ends_the_same(graph: Graph, tmp_path: Path, split_at: int) -> None:
    words = tree({"name": "sage"}, {"batch": 64, "fanouts": [4, 3, 2]}, precision="float32")
    settings = {"checkpoint_seconds": 0}
    run_training(graph, {**words, "train": {**settings, "epochs": 5}}, location=RunLocation(run_dir=tmp_path / "one"))
    run_training(
        graph, {**words, "train": {**settings, "epochs": split_at}}, location=RunLocation(run_dir=tmp_path / "two")
    )
    more = run_training(graph, {"train": {"epochs": 5}}, location=RunLocation(run_dir=tmp_path / "two", resume=True))
    assert_same_checkpoint(tmp_path / "one" / "checkpoints" / "last", tmp_path / "two" / "checkpoints" / "last")
    assert more.record.steps == 5 * 4


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"fanouts": [5, 5]}, "one number per layer, 3; found 2"),
    ({}, {"fanouts": "[5, 5, a]"}, r"strategy.fanouts: expected whole numbers, one per layer, as \[15, 10, 5\]"),
    ({}, {"fanouts": 5}, "strategy.fanouts: expected whole numbers"),
    ({}, {"fanouts": {"node:to:node": [5, 5, 1.5]}}, "strategy.fanouts: expected whole numbers"),
    ({}, {"cache_inputs": "maybe"}, "strategy.cache_inputs: expected auto, true or false; found 'maybe'"),
    ({}, {"fanouts": [5, 5, -2]}, "or −1 for all, found -2"),
    ({}, {"fanouts": {"a:b:c": [5, 5, 5]}}, "must name all of node:to:node"),
    ({}, {"fanouts": [5, 5, 5], "order": "cluster"}, "order=cluster is for full batch"),
    (
        {"name": "gat"},
        {"fanouts": [5, 5, 5], "cache_inputs": True},
        "this model does not allow strategy.cache_inputs=true",
    ),
    ({"input_dropout": 0.1}, {"cache_inputs": True}, "this model does not allow strategy.cache_inputs=true"),
    ({}, {"fanouts": [5, 5, 5], "batch": -1}, "strategy.batch"),
]


@pytest.mark.parametrize(("model", "strategy", "message"), WRONG)
def test_wrong_words(graph: Graph, model: dict[str, Any], strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(graph, resolve(tree(model, strategy)))
