"""gf.train: learning, early stopping, resuming after any checkpoint, one message for every mistake."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.api import train
from gnnfleet.errors import ConfigError, GnnfleetError, InputError, RunError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EDGE, Graph, validated_nodes
from gnnfleet.graph.store import save_store
from gnnfleet.inference.query import open_trained_run
from gnnfleet.nn.config import SAGE
from gnnfleet.report.metrics import read_metrics
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.training import checkpoint
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.run_dir import RunDirectory
from tests.graphs import CLASSES, assert_same_checkpoint, communities

SMALL = SAGE(hidden=16, layers=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return communities()


def test_a_run_learns_and_predicts_by_id() -> None:
    graph = communities(1500)
    record = train(graph, model=SAGE(hidden=32, layers=2), epochs=30, lr=0.01, seed=0)
    assert record.metrics["test"] > 0.6  # one class in ten is right by chance
    assert set(record.predict(["n7", "n0"])) <= set(CLASSES)
    assert record.predict(["n7", "n0"]) == [record.predict()[7], record.predict()[0]]
    assert torch.equal(record.logits(["n7"])[0], record.logits()[7])
    assert record.embeddings().shape == (1500, 32)
    assert record.model.num_layers == 2 and record.run_dir is None
    mask = graph.single_nodes.mask("val")
    assert torch.equal(record.logits(mask), record.logits()[mask]) and len(record.predict(mask)) == int(mask.sum())
    with pytest.raises(InputError, match="no node with id 'nobody'"):
        record.predict(["nobody"])
    with pytest.raises(InputError, match="a mask must have one value for each of 1500 nodes"):
        record.predict(mask[1:])


def test_patience_stops_training_and_the_best_weights_are_kept(graph: Graph, tmp_path: Path) -> None:
    record = train(graph, model=SMALL, epochs=300, patience=5, lr=0.05, run_dir=tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    best = max(rows, key=lambda row: (row["val"], -row["val_loss"]))
    assert record.metrics["val"] == best["val"] and record.metrics["best_epoch"] == best["epoch"]
    assert record.stopped_early and record.summary.epochs == best["epoch"] + 5
    built, position, name = open_trained_run(tmp_path / "run", graph)
    assert name == "best" and position.epoch == position.best_epoch == best["epoch"]
    assert torch.equal(built.strategy.predict().logits, record.logits())


def test_evaluates_every_k_epochs(graph: Graph, tmp_path: Path) -> None:
    train(graph, model=SMALL, epochs=8, eval_every=3, run_dir=tmp_path / "run")
    assert [row["epoch"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "val" in row] == [3, 6, 8]


def test_a_best_checkpoint_newer_than_the_last_is_replaced(graph: Graph, tmp_path: Path) -> None:
    """A kill between the two writes leaves such a best; the record must be about weights that exist."""
    path = tmp_path / "run"
    settings: dict[str, Any] = {"model": SMALL, "patience": 3, "checkpoint_seconds": 0}
    train(graph, epochs=4, run_dir=path, **settings)
    directory = RunDirectory(path)
    last, position = directory.load("last") or ({}, TrainState())
    best = {"model": {name: torch.zeros_like(tensor) for name, tensor in last["model"].items()}}
    directory.save("best", best, replace(position, epoch=5, evaluated=5, best_epoch=5, best_metric=3.0, best_loss=0.0))
    directory.save("last", last, replace(position, best_epoch=1, best_metric=2.0, best_loss=0.0))
    record = train(graph, epochs=7, run_dir=path, resume=True, **settings)
    rows = [row for row in read_metrics(path / "metrics.jsonl") if row["epoch"] > 4]
    chosen = max(rows, key=lambda row: (row["val"], -row["val_loss"]))
    assert len(rows) == 3 and record.metrics["best_epoch"] == chosen["epoch"]
    assert record.metrics["val"] == pytest.approx(chosen["val"])
    built, position, name = open_trained_run(path, graph)
    assert name == "best" and position.best_epoch == chosen["epoch"]
    assert torch.equal(built.strategy.predict().logits, record.logits())


@pytest.mark.parametrize("writes", [1, 2, 3, 8, 15])
def test_a_full_disk_at_any_write_can_be_resumed(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    settings: dict[str, Any] = {"model": SMALL, "epochs": 8, "lr": 0.03, "seed": 3, "checkpoint_seconds": 0, "clip": 1}
    train(graph, run_dir=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", _full_after(writes, checkpoint.save_file))
        with pytest.raises(RunError, match="No space left"):
            train(graph, run_dir=tmp_path / "cut", **settings)
    train(graph, run_dir=tmp_path / "cut", resume=True, **settings)
    for name in ("last", "best"):
        assert_same_checkpoint(tmp_path / "cut" / "checkpoints" / name, tmp_path / "whole" / "checkpoints" / name)
    assert [row["epoch"] for row in read_metrics(tmp_path / "cut" / "metrics.jsonl")] == list(range(1, 9))


def _full_after(writes: int, write: Callable[..., None]) -> Callable[..., None]:
    remaining = writes

    def wrapped(*arguments: Any) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    return wrapped


def test_resuming_with_more_epochs_equals_one_longer_run(graph: Graph, tmp_path: Path) -> None:
    train(graph, model=SMALL, epochs=9, run_dir=tmp_path / "long")
    train(graph, model=SMALL, epochs=4, run_dir=tmp_path / "short")
    record = train(graph, model=SMALL, epochs=9, run_dir=tmp_path / "short", resume=True)
    assert_same_checkpoint(tmp_path / "short/checkpoints/last", tmp_path / "long/checkpoints/last")
    again = train(graph, epochs=9, run_dir=tmp_path / "short", resume=True)  # nothing left to do
    assert again.metrics == record.metrics and torch.equal(again.logits(), record.logits())


def test_only_one_process_may_use_a_run(graph: Graph, tmp_path: Path) -> None:
    train(graph, model=SMALL, epochs=1, run_dir=tmp_path / "run")
    holder = RunDirectory(tmp_path / "run")
    holder.lock()
    with pytest.raises(RunError, match="in use by another process"):
        train(graph, epochs=2, run_dir=tmp_path / "run", resume=True)
    holder.close()
    train(graph, epochs=2, run_dir=tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_is_refused(graph: Graph, tmp_path: Path) -> None:
    train(graph, model=SMALL, epochs=2, run_dir=tmp_path / "run")
    weights = tmp_path / "run/checkpoints/last/model.safetensors"
    broken = bytearray(weights.read_bytes())
    broken[-1] ^= 1
    weights.write_bytes(broken)
    with pytest.raises(RunError, match=r"checkpoint .*last is damaged"):
        train(graph, epochs=4, run_dir=tmp_path / "run", resume=True)


def test_multi_label_runs_predict_lists_of_classes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=draw)
    y = (x[:, :3] > 0).to(torch.int8)
    nodes = validated_nodes(200, x=x, y=y, classes=["red", "green", "blue"])
    edges = Graph(torch.arange(200).repeat(2, 1), num_nodes=200).single_edges
    graph = Graph.of({"node": nodes}, {EDGE: edges})
    record = train(graph, model=SAGE(hidden=32, layers=2, dropout=0.0), epochs=60, lr=0.05, split="0.6/0.2/0.2")
    assert record.metrics["name"] == "micro_f1" and record.metrics["test"] > 0.85
    labels = record.predict([0])[0]
    assert set(labels) <= {"red", "green", "blue"}
    assert train(graph, model=SMALL, epochs=1, split="0.6/0.2/0.2", metric="roc_auc").metrics["name"] == "roc_auc"


def test_without_val_nodes_the_last_weights_are_used(graph: Graph, tmp_path: Path) -> None:
    record = train(graph, model=SMALL, epochs=3, split="0.8/0/0.2", run_dir=tmp_path / "run")
    assert record.metrics["val"] is None and record.metrics["best_epoch"] == 3
    assert open_trained_run(tmp_path / "run", graph)[2] == "last"


def test_learnable_rows_replace_features() -> None:
    graph = make_dataset("communities", nodes=300, mean_degree=8, seed=1)
    nodes = validated_nodes(300, y=graph.single_nodes.y, split=graph.single_nodes.split)
    record = train(Graph.of({"node": nodes}, graph.edges), model=SAGE(hidden=16, layers=2, embedding=8), epochs=5)
    assert record.logits().shape == (300, 10)


def _graph(**changes: Any) -> Graph:
    fields: dict[str, Any] = {"x": torch.randn(6, 3), "y": [0, 1, 0, 1, 0, 1], "split": [0, 0, 1, 1, 2, 2], **changes}
    return Graph([[0, 1, 2, 3], [1, 2, 3, 4]], num_nodes=6, **fields)


def _out_of_range() -> Graph:
    graph = _graph()
    return graph.with_nodes("node", y=torch.tensor([0, 1, 2, 1, 0, 1]), classes=("a", "b"))


MISTAKES: list[tuple[Callable[[], Graph], dict[str, Any], type[GnnfleetError], str]] = [
    (lambda: _graph(y=None), {}, InputError, "the graph has no labels"),
    (lambda: _graph(y=[-1] * 6), {}, InputError, "no node has a label"),
    (_out_of_range, {}, InputError, "label 2 is out of range: expected 0 to 1"),
    (lambda: _graph(x=None), {}, ConfigError, 'no features: set model={"embedding": 64}'),
    (lambda: _graph(split=None), {}, ConfigError, "the graph has no split"),
    (lambda: _graph(split=[1, 1, 1, 1, 2, 2]), {}, ConfigError, "training split has no labelled nodes"),
    (
        lambda: _graph(split=[0] * 6),
        {"patience": 3},
        ConfigError,
        "patience needs val nodes and the split has none: set patience=0",
    ),
    (_graph, {"split": "0.6/0.6/0.2"}, ConfigError, "a split has the form TRAIN/VAL/TEST"),
    (_graph, {"metric": "roc_auc", "y": 3}, ConfigError, "no setting 'y'"),
    (_graph, {"epoch": 3}, ConfigError, "did you mean epochs=…?"),
    (_graph, {"lr": 1e30, "optimizer": "sgd", "epochs": 50}, RunError, r"the loss is (nan|inf) in epoch \d+, step 0"),
    (_graph, {"resume": True}, ConfigError, "resume needs run_dir"),
]


@pytest.mark.parametrize(("make", "settings", "kind", "message"), MISTAKES)
def test_mistakes_get_one_message(
    make: Callable[[], Graph], settings: dict[str, Any], kind: type[GnnfleetError], message: str, tmp_path: Path
) -> None:
    run_dir = {} if "resume" in settings else {"run_dir": tmp_path / "run"}
    with pytest.raises(kind, match=message) as caught:
        train(make(), model=SAGE(hidden=4, layers=2), **settings, **run_dir)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    if kind is not RunError:
        assert not list(tmp_path.iterdir())


def test_a_store_and_a_graph_give_the_same_results(graph: Graph, tmp_path: Path) -> None:
    save_store(graph, tmp_path / "store")
    records = [train(source, model=SMALL, epochs=3) for source in (graph, str(tmp_path / "store"))]
    assert torch.equal(records[0].logits(), records[1].logits())


def test_the_strategy_of_a_config_stays_unless_another_is_named(graph: Graph, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[strategy]\nname = "sar"\ngroup = 1\n[model]\nname = "sage"\nhidden = 4\nlayers = 2\n')
    kept = train(graph, config=file, epochs=1, prefetch=0).config.strategy
    assert isinstance(kept, SarConfig) and (kept.group, kept.prefetch) == (1, 0)
    named = train(graph, config=file, strategy="local", epochs=1).config.strategy
    assert named == train(graph, model=SMALL, epochs=1).config.strategy == LocalConfig()
    with pytest.raises(ConfigError, match="no setting 'fanouts'"):
        train(graph, config=file, epochs=1, fanouts=[5, 5])
    with pytest.raises(ConfigError, match="strategy=3: expected a name or a table"):
        train(graph, config={"strategy": 3}, epochs=1)
