"""Defaults for a graph: rules, the user's settings, and a zero-flag run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gnnfleet as gf
from gnnfleet.config.resolve import flatten
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.training.auto_defaults import GraphFacts, choose_defaults, measure_facts, with_auto_defaults


def random_graph(*, homophily: float, labels: int = 600, x: torch.Tensor | None = None) -> Graph:
    """1,000 nodes of 4 classes of very different sizes; a share of edges joins equal labels, the others are random."""
    generator = torch.Generator().manual_seed(1)
    y = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), 1000, replacement=True, generator=generator)
    src = torch.randint(1000, (20_000,), generator=generator)
    dst = torch.randint(1000, (20_000,), generator=generator)
    order = torch.argsort(y, stable=True)
    first = torch.searchsorted(y[order], y[src])
    counts = torch.bincount(y)[y[src]]
    same = order[first + (torch.rand(20_000, generator=generator) * counts).long()]
    dst = torch.where(torch.rand(20_000, generator=generator) < homophily, same, dst)
    split = torch.full((1000,), 1)
    split[torch.randperm(1000, generator=generator)[:labels]] = 0
    x = torch.randn(1000, 5, generator=generator) if x is None else x
    return Graph(torch.stack([src, dst]), x=x, y=y, split=split)


@pytest.mark.parametrize("homophily", [0.0, 0.4, 0.9])
def test_homophily_is_adjusted_for_class_sizes(homophily: float) -> None:
    nodes = (graph := random_graph(homophily=homophily)).single_nodes
    facts = measure_facts(graph, nodes, nodes.split[0])
    assert facts.homophily == pytest.approx(homophily, abs=0.05)
    assert (facts.labels_per_class, facts.features, facts.validates) == (150, "plain", True)


def test_only_training_labels_are_read() -> None:
    graph = random_graph(homophily=0.9)
    nodes = graph.single_nodes
    others = nodes.split[0] != 0
    hidden = torch.where(others, nodes.y.flip(0), nodes.y)
    changed = graph.with_nodes("node", y=hidden)
    assert measure_facts(graph, nodes, nodes.split[0]) == measure_facts(changed, changed.single_nodes, nodes.split[0])


def test_kinds_of_features() -> None:
    dense, counts = torch.randn(1000, 6), (torch.rand(1000, 50) < 0.05).float()
    scaled, shifted = dense * torch.tensor([1, 1, 1, 1, 1, 1e3]), dense + torch.tensor([0, 0, 0, 0, 0, 1.7e9])
    kinds = []
    for x in (dense, counts, scaled, shifted, torch.ones(1000, 2)):
        graph = random_graph(homophily=0.5, x=x)
        kinds.append(measure_facts(graph, graph.single_nodes, graph.single_nodes.split[0]).features)
    bare = gf.Graph(graph.single_edges.edge_index(), y=graph.single_nodes.y, split=graph.single_nodes.split)
    kinds.append(measure_facts(bare, bare.single_nodes, bare.single_nodes.split[0]).features)
    assert with_auto_defaults(bare, {}, quiet=True)["model"]["embedding"] == 64
    assert kinds.pop() == "none" and kinds == ["plain", "bag of words", "other scales", "other scales", "plain"]


def test_settings_of_the_user_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gnnfleet")
    graph = random_graph(homophily=0.9)
    own = {"model": {"name": "gat", "layers": 7}, "train": {"lr": 0.5}, "seed": 3}
    settings = flatten(with_auto_defaults(graph, own))
    assert (settings["model.name"], settings["model.layers"], settings["train.lr"]) == ("gat", 7, 0.5)
    assert settings["auto_defaults"] is False and settings["model.norm"] == "layer"
    assert "150 labels per class" in caplog.text and "lr=" not in caplog.text
    chosen = with_auto_defaults(graph, own, quiet=True)
    caplog.clear()
    assert with_auto_defaults(graph, chosen) == chosen and not caplog.text
    assert with_auto_defaults(graph, {"auto_defaults": False}) == {"auto_defaults": False}


def test_defaults_suit_every_strategy() -> None:
    """Batch norm is refused by sampled strategies and by pipelines."""
    for labels in (5, 500):
        for homophily in (None, 0.0, 0.9):
            facts = GraphFacts(labels, False, "plain", homophily, False, True)
            for model in ("", "gcn2", "res+", "gat"):
                assert choose_defaults(facts, model).get("model.norm") != "batch"


@pytest.mark.parametrize("strategy", ["local", "sar"])
def test_a_run_without_settings_learns_and_records_them(strategy: str) -> None:
    graph: Any = make_dataset("communities", nodes=600, edges=6000, classes=5, features=16)
    x = graph.single_nodes.x * 1e-3 + torch.tensor([1.6e9, *[0.0] * 15])  # a time stamp among small numbers
    graph, options = graph.with_nodes("node", x=x), {"strategy": strategy, "epochs": 40, "model.hidden": 32}
    record = gf.train(graph, quiet=True, **options)
    assert record.config.model.input_norm == "standardize" and not record.config.auto_defaults
    plain = gf.train(graph, quiet=True, auto_defaults=False, **options)
    assert record.metrics["test"] > plain.metrics["test"] + 0.1
