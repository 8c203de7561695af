"""local equals a plain loop; order and chunks change rounding only."""

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


@pytest.fixture(scope="module")
def graph() -> Graph:
    made = make_dataset("communities", nodes=400, mean_degree=8, seed=3)
    # Neighbours far apart in the store, so that cluster order is another order.
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    place = torch.argsort(order)
    nodes, edges = made.single_nodes, made.single_edges
    assert nodes.x is not None and nodes.y is not None and nodes.split is not None
    weight = torch.rand(edges.count, generator=torch.Generator().manual_seed(1))
    return Graph(
        place[edges.edge_index()], x=nodes.x[order], y=nodes.y[order], split=nodes.split[:, order], edge_weight=weight
    )


@pytest.fixture(scope="module")
def hetero() -> Graph:
    return make_dataset("shop", seed=1, **SHOP)


SHOP = {"users": 300, "products": 200, "brands": 10, "buys": 2000, "views": 3000}


def words(model: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": {"hidden": 16, "layers": 3, "dropout": 0.4, **model}, "precision": "float64", "seed": 5, **more}


def made(graph: Graph, tree: dict[str, Any]) -> Strategy:
    return build(graph, resolve(tree)).strategy


MODELS = [
    {"name": "sage", "norm": "batch"},
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "gat", "heads": 4},
    {"name": "gcn2", "layers": 4},
    {"name": "res+", "norm": "layer"},
    {"name": "sage", "aggr": "max", "embedding": 8},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(map(str, m.values())))
def test_equals_a_plain_loop(graph: Graph, model: dict[str, Any]) -> None:
    config = resolve(words(model, train={"lr": 0.02, "weight_decay": 1e-3}))
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


def test_same_seed_same_bits(graph: Graph) -> None:
    one, two = (made(graph, words({"name": "gat"}, precision="float32")) for _ in range(2))
    for strategy in (one, two):
        for epoch in range(3):
            list(strategy.train_epoch(epoch))
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, two.model.state_dict()[name]), name


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(map(str, m.values())))
def test_order_changes_rounding_only(graph: Graph, model: dict[str, Any]) -> None:
    store, cluster = (made(graph, words(model, strategy={"order": order})) for order in ("store", "cluster"))
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
    whole = made(graph, words(model, strategy={"order": order}))
    list(whole.train_epoch(0))
    chunked = made(graph, words(model, strategy={"order": order}, memory=limit))
    chunked.load_state_dict({"model": whole.state_dict()["model"]})
    expected, found = whole.predict(embeddings=True), chunked.predict(embeddings=True)
    assert expected.embeddings is not None and found.embeddings is not None
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.embeddings, expected.embeddings, rtol=1e-9, atol=1e-11)
    assert chunked.evaluate("test") == pytest.approx(whole.evaluate("test"), rel=1e-9)


def test_several_node_types(hetero: Graph) -> None:
    tree = words({"name": "rgcn", "layers": 2, "hidden": 8, "bases": 2}, split="0.6/0.2/0.2")
    whole = made(hetero, tree)
    first = [record.loss for epoch in range(5) for record in whole.train_epoch(epoch)]
    assert first[-1] < first[0]
    for change in ({"strategy": {"order": "cluster"}}, {"strategy": {"order": "store"}, "memory": 30_000}):
        other = made(hetero, {**tree, **change})
        other.load_state_dict({"model": whole.state_dict()["model"]})
        torch.testing.assert_close(other.predict().logits, whole.predict().logits, rtol=1e-9, atol=1e-11)


def test_bf16_is_close_and_keeps_float32_weights(graph: Graph) -> None:
    exact = made(graph, words({"name": "sage", "dropout": 0.0}, precision="float32"))
    rough = made(graph, words({"name": "sage", "dropout": 0.0}, precision="bf16"))
    for epoch in range(5):
        losses = [next(iter(s.train_epoch(epoch))).loss for s in (exact, rough)]
        assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert all(t.dtype == torch.float32 for t in rough.state_dict()["model"].values())
    assert all(t.dtype == torch.float32 for t in rough.state_dict()["optimizer"].values())


def test_evaluation_is_exact_and_leaves_training_alone(graph: Graph) -> None:
    watched, blind = (made(graph, words({"name": "sage", "norm": "batch"})) for _ in range(2))
    for epoch in range(3):
        list(watched.train_epoch(epoch))
        list(blind.train_epoch(epoch))
        watched.evaluate("val")
    states: list[dict[str, Tensor]] = [dict(s.model.state_dict()) for s in (watched, blind)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    nodes = graph.single_nodes
    logits = watched.predict().logits[nodes.mask("test")]
    assert nodes.y is not None
    right = (logits.argmax(1) == nodes.y[nodes.mask("test")]).double().mean()
    assert watched.evaluate("test")["accuracy"] == pytest.approx(float(right))
