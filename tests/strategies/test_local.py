"""local equals a plain loop; node order and chunks change rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.config.resolve import resolve
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.model import build_model
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.training.build import build
from tests.graphs import scores_of


@pytest.fixture(scope="module")
def graph() -> Graph:
    generated = make_dataset("communities", nodes=400, mean_degree=8, seed=3)
    # Neighbours are far apart in the store, so that cluster order differs.
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    new_row = torch.argsort(order)
    nodes, edges = generated.single_nodes, generated.single_edges
    assert nodes.x is not None and nodes.y is not None and nodes.split is not None
    weight = torch.rand(edges.count, generator=torch.Generator().manual_seed(1))
    return Graph(
        new_row[edges.edge_index()], x=nodes.x[order], y=nodes.y[order], split=nodes.split[:, order], edge_weight=weight
    )


@pytest.fixture(scope="module")
def hetero() -> Graph:
    return make_dataset("shop", seed=1, **SHOP)


SHOP = {"users": 300, "products": 200, "brands": 10, "buys": 2000, "views": 3000}


def run_settings(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"model": {"hidden": 16, "layers": 3, "dropout": 0.4, **model}, "precision": "float64", "seed": 5, **options}


def make_strategy(graph: Graph, settings: dict[str, Any]) -> Strategy:
    return build(graph, resolve(settings)).strategy


MODELS = [
    {"name": "sage", "norm": "batch"},
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "gat", "heads": 4},
    {"name": "gcn2", "layers": 4},
    {"name": "res+", "norm": "layer"},
    {"name": "sage", "aggr": "max", "embedding": 8},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(map(str, m.values())))
def test_training_equals_a_plain_loop(graph: Graph, model: dict[str, Any]) -> None:
    config = resolve(run_settings(model, train={"lr": 0.02, "weight_decay": 1e-3}))
    strategy = build(graph, config).strategy
    losses = [record.loss for epoch in range(4) for record in strategy.train_epoch(epoch)]

    torch.manual_seed(5)
    plain = build_model(config.model, graph).double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02, weight_decay=1e-3)
    view, nodes = LocalView.of_graph(graph), graph.single_nodes
    assert nodes.x is not None and nodes.y is not None
    expected = []
    for epoch in range(4):
        optimizer.zero_grad()
        logits = plain(view.with_step(key=DrawKey(5, epoch, 0)), nodes.x.double())
        loss = functional.cross_entropy(logits[nodes.mask("train")], nodes.y[nodes.mask("train")])
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-12, atol=0)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(strategy.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_runs_of_one_seed_are_equal_bit_for_bit(graph: Graph) -> None:
    first, second = (make_strategy(graph, run_settings({"name": "gat"}, precision="float32")) for _ in range(2))
    for strategy in (first, second):
        for epoch in range(3):
            list(strategy.train_epoch(epoch))
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(map(str, m.values())))
def test_order_changes_rounding_only(graph: Graph, model: dict[str, Any]) -> None:
    store, cluster = (
        make_strategy(graph, run_settings(model, strategy={"order": order})) for order in ("store", "cluster")
    )
    for epoch in range(2):
        list(store.train_epoch(epoch))
        list(cluster.train_epoch(epoch))
    for name, tensor in store.model.state_dict().items():
        torch.testing.assert_close(cluster.model.state_dict()[name], tensor, rtol=1e-7, atol=1e-9, msg=name)
    torch.testing.assert_close(cluster.predict().logits, store.predict().logits, rtol=1e-6, atol=1e-8)


# Bytes of a few chunks with layer outputs in mapped files; fewer bytes than a single destination needs.
CHUNKS = [(model, 40_000, order) for model, order in zip(MODELS, ["store", "cluster"] * 3, strict=True)]
CHUNKS += [(MODELS[1], 1_000, "store")]


@pytest.mark.parametrize(("model", "limit", "order"), CHUNKS)
def test_chunks_change_rounding_only(graph: Graph, model: dict[str, Any], limit: int, order: str) -> None:
    unchunked = make_strategy(graph, run_settings(model, strategy={"order": order}))
    list(unchunked.train_epoch(0))
    chunked = make_strategy(graph, run_settings(model, strategy={"order": order}, evaluation_memory=limit))
    chunked.load_state_dict({"model": unchunked.state_dict()["model"]})
    expected, actual = unchunked.predict(embeddings=True), chunked.predict(embeddings=True)
    assert expected.embeddings is not None and actual.embeddings is not None
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(actual.embeddings, expected.embeddings, rtol=1e-9, atol=1e-11)
    assert scores_of(chunked.evaluate("test")) == pytest.approx(scores_of(unchunked.evaluate("test")), rel=1e-9)


def test_several_node_types_train_and_order_and_chunks_change_rounding_only(hetero: Graph) -> None:
    settings = run_settings({"name": "rgcn", "layers": 2, "hidden": 8, "bases": 2}, split="0.6/0.2/0.2")
    strategy = make_strategy(hetero, settings)
    losses = [record.loss for epoch in range(5) for record in strategy.train_epoch(epoch)]
    assert losses[-1] < losses[0]
    for change in ({"strategy": {"order": "cluster"}}, {"strategy": {"order": "store"}, "evaluation_memory": 30_000}):
        other = make_strategy(hetero, {**settings, **change})
        other.load_state_dict({"model": strategy.state_dict()["model"]})
        torch.testing.assert_close(other.predict().logits, strategy.predict().logits, rtol=1e-9, atol=1e-11)


def test_bf16_is_close_and_keeps_float32_weights(graph: Graph) -> None:
    exact = make_strategy(graph, run_settings({"name": "sage", "dropout": 0.0}, precision="float32"))
    rounded = make_strategy(graph, run_settings({"name": "sage", "dropout": 0.0}, precision="bf16"))
    for epoch in range(5):
        losses = [next(iter(s.train_epoch(epoch))).loss for s in (exact, rounded)]
        assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert all(t.dtype == torch.float32 for t in rounded.state_dict()["model"].values())
    assert all(t.dtype == torch.float32 for t in rounded.state_dict()["optimizer"].values())


def test_evaluation_is_exact_and_does_not_change_training(graph: Graph) -> None:
    evaluated, unevaluated = (make_strategy(graph, run_settings({"name": "sage", "norm": "batch"})) for _ in range(2))
    for epoch in range(3):
        list(evaluated.train_epoch(epoch))
        list(unevaluated.train_epoch(epoch))
        evaluated.evaluate("val")
    states: list[dict[str, Tensor]] = [dict(s.model.state_dict()) for s in (evaluated, unevaluated)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    nodes = graph.single_nodes
    logits = evaluated.predict().logits[nodes.mask("test")]
    assert nodes.y is not None
    accuracy = (logits.argmax(1) == nodes.y[nodes.mask("test")]).double().mean()
    assert evaluated.evaluate("test")["accuracy"] == pytest.approx(float(accuracy))
