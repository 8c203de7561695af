"""A trained run on other stores: predictions without labels, classes by name, one message if the store does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.api import Record, train
from gnnfleet.errors import ConfigError, InputError, RunError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EDGE, Graph, validated_nodes
from gnnfleet.graph.store import save_store
from gnnfleet.inference.predict import write_predictions
from gnnfleet.inference.query import open_trained_run
from gnnfleet.nn.config import RGCN, SAGE
from gnnfleet.training.output_schema import OutputSchema
from tests.graphs import CLASSES, communities
from tests.shell import call, run_json

MODEL = SAGE(hidden=16, layers=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    path = tmp_path_factory.mktemp("runs") / "run"
    save_store(communities(), path.parent / "store")
    return path, train(path.parent / "store", model=MODEL, epochs=10, lr=0.02, seed=1, run_dir=path)


def other(**changes: Any) -> Graph:
    """The same graph with other fields of nodes."""
    graph = communities()
    nodes = graph.single_nodes
    fields: dict[str, Any] = {"x": nodes.x, "y": nodes.y, "split": nodes.split, "classes": nodes.classes, **changes}
    return Graph.of({"node": validated_nodes(300, **fields)}, graph.edges)


def test_the_shell_predicts_and_evaluates_another_store(trained: tuple[Path, Record], tmp_path: Path) -> None:
    path, record = trained
    bare = other(y=None, classes=(), split=None)
    save_store(bare, tmp_path / "bare")
    output = tmp_path / "out.parquet"
    assert run_json("predict", path, "-o", output, "--store", tmp_path / "bare")["rows"] == 300
    rows = pq.read_table(output)
    assert rows["prediction"].to_pylist() == record.predict() and rows["id"].to_pylist() == list(range(300))
    refused = call("evaluate", path, "--store", tmp_path / "bare")
    assert refused.returncode == 3 and "error: this store has no labels to compare with" in refused.stderr
    save_store(other(split=None), tmp_path / "unsplit")
    metrics = run_json("evaluate", path, "--store", tmp_path / "unsplit", "--split", "all", "--memory", "1MiB")
    assert metrics["nodes"] == 300 and metrics["split"] == "all"
    nodes = communities().single_nodes
    assert nodes.y is not None
    correct = [name == CLASSES[y] for name, y in zip(record.predict(), nodes.y.tolist(), strict=True)]
    assert metrics["value"] == pytest.approx(sum(correct) / 300)


def test_the_schema_is_saved_with_the_run(trained: tuple[Path, Record]) -> None:
    schema = OutputSchema.from_json(json.loads((trained[0] / "config.json").read_text())["output"])
    assert schema == OutputSchema.of(communities())
    assert (schema.target, schema.num_classes, schema.multilabel, schema.classes) == ("node", 10, False, CLASSES)


def test_classes_are_matched_by_name(trained: tuple[Path, Record]) -> None:
    path, record = trained
    nodes = communities().single_nodes
    assert nodes.y is not None
    reversed_classes = other(y=9 - nodes.y, classes=CLASSES[::-1])  # the same names under other numbers
    built, _, _ = open_trained_run(path, reversed_classes, split="test")
    assert built.strategy.evaluate("test")["accuracy"] == record.metrics["test"]
    three_classes = torch.where(nodes.y < 3, nodes.y, -1)
    few = other(y=three_classes, classes=CLASSES[:3])  # a store with some of the classes only
    assert open_trained_run(path, few, split="all")[0].strategy.evaluate("test")["count"] == int(
        (three_classes >= 0).sum()
    )
    strange = other(y=nodes.y, classes=(*CLASSES[:9], "new"))
    with pytest.raises(RunError, match="class 'new' of this store is not among"):
        open_trained_run(path, strange, split="test")
    unnamed = other(classes=())
    assert (
        open_trained_run(path, unnamed, split="test")[0].strategy.evaluate("test")["accuracy"] == record.metrics["test"]
    )
    with pytest.raises(RunError, match="the run has classes 0 to 9, this store has class 12"):
        open_trained_run(path, other(y=nodes.y + 3, classes=()), split="test")


def test_the_message_names_the_difference(trained: tuple[Path, Record]) -> None:
    path = trained[0]
    nodes = communities().single_nodes
    assert nodes.x is not None and nodes.y is not None
    with pytest.raises(RunError, match="trained on 64 features per node, this store has 5: import it with the same"):
        open_trained_run(path, other(x=nodes.x[:, :5]))
    with pytest.raises(RunError, match="this store has 0"):
        open_trained_run(path, other(x=None))
    with pytest.raises(InputError, match="evaluate needs them, predict does not"):
        open_trained_run(path, other(y=None, classes=()), split="test")
    with pytest.raises(ConfigError, match="no split: evaluate all of it with --split all"):
        open_trained_run(path, other(split=None), split="test")
    with pytest.raises(RunError, match="one label per node, this store has several"):
        open_trained_run(path, other(y=torch.zeros(300, 10, dtype=torch.int8)), split="test")
    with pytest.raises(RunError, match=r"predicts nodes of type .node., this store has user, product, brand"):
        open_trained_run(path, make_dataset("shop", seed=1, users=20, products=20, brands=3, buys=40, views=40))
    with pytest.raises(ConfigError, match=r"memory .much. is not a size"):
        open_trained_run(path, other(), memory="much")
    torch.testing.assert_close(open_trained_run(path, other())[0].strategy.predict().logits, trained[1].logits())


def test_a_single_node_type_may_have_another_name(trained: tuple[Path, Record]) -> None:
    graph = communities()
    edges = next(iter(graph.edges.values()))
    renamed = Graph.of({"paper": graph.single_nodes}, {EDGE._replace(src="paper", dst="paper"): edges})
    assert torch.equal(open_trained_run(trained[0], renamed)[0].strategy.predict().logits, trained[1].logits())


def test_a_store_may_have_more_nodes(trained: tuple[Path, Record], tmp_path: Path) -> None:
    built, _, _ = open_trained_run(trained[0], communities(700))
    assert write_predictions(built, tmp_path / "out.parquet") == 700


def test_embeddings_do_not_serve_other_nodes(tmp_path: Path) -> None:
    train(communities(), model=SAGE(hidden=8, layers=2, embedding=4), epochs=1, run_dir=tmp_path / "run")
    assert open_trained_run(tmp_path / "run", other(y=None, classes=()))[0].strategy.predict().logits.shape == (300, 10)
    with pytest.raises(RunError, match="has an embedding for each of its 300 nodes and cannot serve the 700 nodes"):
        open_trained_run(tmp_path / "run", communities(700))


def test_several_labels_and_several_types(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    y = (x[:, :3] > 0).to(torch.int8)
    edges = Graph(torch.randint(0, 60, (2, 200)), num_nodes=60).edges
    named = Graph.of({"node": validated_nodes(60, x=x, y=y, classes=["red", "green", "blue"])}, edges)
    record = train(named, model=MODEL, epochs=2, split="0.6/0.2/0.2", run_dir=tmp_path / "many")
    bare = Graph.of({"node": validated_nodes(60, x=x)}, edges)
    built, _, _ = open_trained_run(tmp_path / "many", bare)
    write_predictions(built, tmp_path / "many.parquet")
    assert pq.read_table(tmp_path / "many.parquet")["prediction"].to_pylist() == record.predict()
    with pytest.raises(RunError, match="trained on 3 labels per node"):
        open_trained_run(
            tmp_path / "many", Graph.of({"node": validated_nodes(60, x=x, y=y[:, :2])}, edges), split="all"
        )
    other_names = validated_nodes(60, x=x, y=y, classes=["red", "blue", "green"])
    with pytest.raises(RunError, match="label 1 of the run is 'green', of this store 'blue'"):
        open_trained_run(tmp_path / "many", Graph.of({"node": other_names}, edges), split="all")

    shop = make_dataset("shop", seed=1, users=60, products=40, brands=5, buys=300, views=400)
    target = shop.labelled_type
    assert target is not None
    record = train(shop, model=RGCN(hidden=8, layers=2), epochs=2, split="0.6/0.2/0.2", run_dir=tmp_path / "shop")
    unlabelled = shop.with_nodes(target, y=None, split=None)
    foreign = next(kind for kind in shop.nodes if kind != target)
    unlabelled = unlabelled.with_nodes(foreign, y=torch.zeros(shop.nodes[foreign].count, dtype=torch.int64))
    built = open_trained_run(tmp_path / "shop", unlabelled)[0]
    assert built.task.target == target and torch.equal(built.strategy.predict().logits, record.logits())
    with pytest.raises(RunError, match="predicts nodes of type"):
        open_trained_run(tmp_path / "shop", communities())
