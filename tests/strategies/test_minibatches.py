"""local on sampled blocks: with all neighbours it equals full batch; prefetch, caches and resuming change nothing."""

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
from tests.graphs import assert_same_checkpoint, scores_of


@pytest.fixture(scope="module")
def graph() -> Graph:
    generated = make_dataset("communities", nodes=400, mean_degree=8, seed=3)
    weight = torch.rand(generated.num_edges, generator=torch.Generator().manual_seed(1))
    nodes = generated.single_nodes
    return Graph(generated.single_edges.edge_index(), x=nodes.x, y=nodes.y, split=nodes.split, edge_weight=weight)


@pytest.fixture(scope="module")
def hetero() -> Graph:
    return make_dataset("shop", seed=1, users=300, products=200, brands=10, buys=2000, views=3000)


def run_settings(model: dict[str, Any], strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    model = {"hidden": 16, "layers": 3, "dropout": 0.4, **model}
    return {"model": model, "strategy": strategy, "precision": "float64", "seed": 5, "split": "0.6/0.2/0.2", **options}


def fit(graph: Graph, settings: dict[str, Any], epochs: int = 2) -> tuple[Strategy, list[tuple[float, int]]]:
    strategy = build(graph, resolve(settings)).strategy
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
def test_all_neighbours_equal_the_whole_graph(graph: Graph, model: dict[str, Any], cache: Any) -> None:
    fanouts = [-1] * model.get("layers", 3)
    full_batch, losses = fit(graph, run_settings(model, {"batch": 100}))
    sampled, sampled_losses = fit(graph, run_settings(model, {"batch": 100, "fanouts": fanouts, "cache_inputs": cache}))
    assert [count for _, count in sampled_losses] == [count for _, count in losses] == [100, 100, 40] * 2
    torch.testing.assert_close(torch.tensor(sampled_losses), torch.tensor(losses), rtol=1e-10, atol=0)
    for name, tensor in weights(full_batch).items():
        torch.testing.assert_close(weights(sampled)[name], tensor, rtol=1e-8, atol=1e-10, msg=name)
    expected = scores_of(full_batch.evaluate("test"))
    assert scores_of(sampled.evaluate("test")) == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(sampled.predict().logits, full_batch.predict().logits, rtol=1e-7, atol=1e-9)


def with_features(graph: Graph) -> Graph:
    """Features for every node type, of different widths."""
    random = torch.Generator().manual_seed(4)
    for width, (node_type, nodes) in enumerate(graph.nodes.items(), start=3):
        graph = graph.with_nodes(node_type, x=torch.randn(nodes.count, width, generator=random))
    return graph


@pytest.mark.parametrize(
    ("cache", "name"),
    [(False, "rgcn"), (True, "rgcn"), (None, "rgcn"), (None, "hetero-gat"), (False, "hetero-sage"), (None, "hgt")],
)
def test_all_neighbours_equal_the_whole_graph_on_several_node_types(
    hetero: Graph, cache: bool | None, name: str
) -> None:
    graph = hetero if cache is None else with_features(hetero)  # learnt rows cannot be cached
    options: dict[str, Any] = {} if cache is None else {"cache_inputs": cache}
    model = {"name": name, "layers": 2, "hidden": 8, "bases": 2}
    full_batch, losses = fit(graph, run_settings(model, {"batch": 50, "cache_inputs": False}))
    sampled, sampled_losses = fit(graph, run_settings(model, {"batch": 50, "fanouts": [-1, -1], **options}))
    torch.testing.assert_close(torch.tensor(sampled_losses), torch.tensor(losses), rtol=1e-9, atol=0)
    for name, tensor in weights(full_batch).items():
        torch.testing.assert_close(weights(sampled)[name], tensor, rtol=1e-8, atol=1e-10, msg=name)
    if cache:
        cached, cached_losses = fit(graph, run_settings(model, {"batch": 50, "cache_inputs": True}))
        torch.testing.assert_close(torch.tensor(cached_losses), torch.tensor(losses), rtol=1e-9, atol=0)
        torch.testing.assert_close(cached.predict().logits, full_batch.predict().logits, rtol=1e-7, atol=1e-9)
    fanouts = {str(edge_type): [3, 2] for edge_type in graph.edges}
    _, sampled_losses = fit(graph, run_settings(model, {"batch": 50, "fanouts": fanouts}), epochs=8)
    assert sum(loss for loss, _ in sampled_losses[-5:]) < sum(loss for loss, _ in sampled_losses[:5])


@pytest.mark.parametrize("model", [{"name": "sage"}, {"name": "gat"}], ids=lambda m: m["name"])
@pytest.mark.parametrize("replace", [False, True])
def test_prefetch_changes_no_bit(graph: Graph, model: dict[str, Any], replace: bool) -> None:
    strategy = {"batch": 32, "fanouts": [4, 3, 2], "replace": replace}
    runs = [
        fit(graph, run_settings(model, {**strategy, "prefetch": depth}, precision="float32")) for depth in (0, 1, 2, 2)
    ]
    for other, losses in runs[1:]:
        assert losses == runs[0][1]
        assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(runs[0][0]).items())


def test_cached_inputs_equal_all_neighbours_in_the_last_hop(graph: Graph) -> None:
    for name in ("sage", "gcn", "gin"):
        cached, losses = fit(graph, run_settings({"name": name}, {"batch": 64, "fanouts": [4, 3, 2]}))
        uncached, uncached_losses = fit(
            graph, run_settings({"name": name}, {"batch": 64, "fanouts": [4, 3, -1], "cache_inputs": False})
        )
        torch.testing.assert_close(torch.tensor(uncached_losses), torch.tensor(losses), rtol=1e-10, atol=0)
        for key, tensor in weights(uncached).items():
            torch.testing.assert_close(weights(cached)[key], tensor, rtol=1e-8, atol=1e-10, msg=key)


def test_sampled_training_learns(graph: Graph) -> None:
    settings = run_settings({"name": "sage", "dropout": 0.0}, {"batch": 64, "fanouts": [5, 5, 5]}, precision="float32")
    strategy, losses = fit(graph, settings, epochs=15)
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert strategy.evaluate("test")["accuracy"] > 0.6


@pytest.mark.parametrize("split_at", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(graph: Graph, tmp_path: Path, split_at: int) -> None:
    settings = run_settings({"name": "sage"}, {"batch": 64, "fanouts": [4, 3, 2]}, precision="float32")
    train = {"checkpoint_seconds": 0}
    run_training(graph, {**settings, "train": {**train, "epochs": 5}}, location=RunLocation(run_dir=tmp_path / "one"))
    run_training(
        graph, {**settings, "train": {**train, "epochs": split_at}}, location=RunLocation(run_dir=tmp_path / "two")
    )
    resumed = run_training(graph, {"train": {"epochs": 5}}, location=RunLocation(run_dir=tmp_path / "two", resume=True))
    assert_same_checkpoint(tmp_path / "one" / "checkpoints" / "last", tmp_path / "two" / "checkpoints" / "last")
    assert resumed.record.steps == 5 * 4


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
def test_wrong_options_are_refused(graph: Graph, model: dict[str, Any], strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(graph, resolve(run_settings(model, strategy)))
