"""Link runs through gf.train and the command line: learning, evaluation, resuming, scores by original id."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.api import train
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.store import save_store
from gnnfleet.inference.predict import _read_pairs, id_columns, write_predictions, write_scores
from gnnfleet.inference.query import open_trained_run
from gnnfleet.nn.config import SAGE
from tests.graphs import assert_same_checkpoint
from tests.shell import run, run_json

MODEL = SAGE(hidden=16, layers=2, dropout=0.1)
SETTINGS = {"task": "link", "split": "0.8/0.1/0.1", "model": MODEL, "lr": 0.02}


@pytest.fixture(scope="module")
def graph() -> Graph:
    dataset = make_dataset("communities", nodes=300, mean_degree=10, seed=1)
    return Graph(dataset.single_edges.edge_index(), x=dataset.single_nodes.x, ids=[f"n{i}" for i in range(300)])


def test_a_link_run_learns_and_scores_by_id(graph: Graph) -> None:
    before = train(graph, epochs=0, **SETTINGS)
    record = train(graph, epochs=40, **{"link.negatives": 5}, **SETTINGS)
    assert record.metrics["name"] == "mrr"
    assert record.metrics["test"] > max(2 * 0.05, before.metrics["test"])  # by chance about 5.2 / 101
    src, dst = (int(end) for end in graph.single_edges.edge_index()[:, 0])
    scores = record.score([(f"n{src}", f"n{dst}"), (f"n{dst}", f"n{src}")])
    assert scores[0] == scores[1] and 0 < scores[0] < 1
    rows = record.embeddings([f"n{src}", f"n{dst}"])
    assert torch.sigmoid(rows[0] @ rows[1]).item() == pytest.approx(scores[0].item(), abs=1e-6)
    with pytest.raises(InputError, match="no node with id 'nobody'"):
        record.score([("n1", "nobody")])
    with pytest.raises(ConfigError, match=r"use record\.score"):
        record.predict()


@pytest.mark.parametrize(("scale", "is_logged"), [(100.0, True), (0.1, False)])
def test_equal_scores_of_all_candidates_are_reported(
    graph: Graph, tmp_path: Path, scale: float, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Features that are all large and positive: the first steps are so large that all rows become alike."""
    x = scale * torch.rand(300, 3, generator=torch.Generator().manual_seed(0))
    settings = {"task": "link", "split": "0.8/0.1/0.1", "model": SAGE(hidden=64, layers=3)}
    caplog.set_level("INFO", "gnnfleet")
    train(Graph(graph.single_edges.edge_index(), x=x), epochs=30, run_dir=tmp_path / "run", **settings)
    text = "All candidates have nearly the same score in the last evaluation (val mrr 0.0196): try a smaller train.lr"
    assert (text.replace("train.lr", "lr") in caplog.text) is is_logged  # keywords of gf.train
    assert (
        (tmp_path / "run/remarks.jsonl").exists() and text in (tmp_path / "run/remarks.jsonl").read_text()
    ) is is_logged


def test_a_resumed_run_equals_an_uninterrupted_one(graph: Graph, tmp_path: Path) -> None:
    store = save_store(graph, tmp_path / "store")
    settings = {
        **SETTINGS,
        "link.exclude": "disjoint:0.3",
        "link.decoder": "mlp",
        "link.dropout": 0.2,
        "strategy": "local",
    }
    settings |= {"batch": 100, "checkpoint_seconds": 0}
    train(store, epochs=4, run_dir=tmp_path / "whole", **settings)
    train(store, epochs=2, run_dir=tmp_path / "parts", **settings)
    train(store, epochs=4, run_dir=tmp_path / "parts", resume=True)
    assert_same_checkpoint(tmp_path / "whole/checkpoints/last", tmp_path / "parts/checkpoints/last")


def test_the_command_line_trains_evaluates_and_scores_pairs(graph: Graph, tmp_path: Path) -> None:
    save_store(graph, tmp_path / "store")
    options = ("--task", "link", "--split", "0.8/0.1/0.1", "--set", "model.hidden=16", "--set", "train.epochs=3")
    done = run("train", tmp_path / "store", *options, "--run-dir", tmp_path / "run", "--json")
    record = json.loads(done.stdout)
    assert record["metrics"]["name"] == "mrr" and 0 < record["metrics"]["test"] <= 1
    assert done.stderr.count("message passing sees the edges that are trained on") == 1
    again = run_json("evaluate", tmp_path / "run")
    assert again["value"] == record["metrics"]["test"] and again["links"] > 0 and "hits@10" in again["metrics"]
    (tmp_path / "pairs.csv").write_text("src,dst\nn1,n2\nn3,n4\n")
    run_json("predict", tmp_path / "run", "-o", tmp_path / "scores.parquet", "--pairs", tmp_path / "pairs.csv")
    scores = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    assert scores["src"] == ["n1", "n3"] and all(0 < p < 1 for p in scores["probability"])


def test_embeddings_are_written_and_pairs_need_their_columns(graph: Graph, tmp_path: Path) -> None:
    record = train(graph, epochs=1, run_dir=tmp_path / "run", **SETTINGS)
    built = open_trained_run(tmp_path / "run", graph)[0]
    assert write_predictions(built, tmp_path / "rows.parquet") == 300
    rows = pq.read_table(tmp_path / "rows.parquet").to_pydict()
    assert rows["id"][7] == "n7"
    assert torch.equal(torch.tensor(rows["embedding"]), record.embeddings())
    (tmp_path / "pairs.csv").write_text("from,to\nn1,n2\n")
    with pytest.raises(InputError, match="columns src and dst, found from, to: there is no column src"):
        write_scores(built, tmp_path / "pairs.csv", tmp_path / "scores.parquet")


def test_ids_of_both_ends_may_have_different_types(tmp_path: Path) -> None:
    buys = EdgeType("user", "buys", "item")
    graph = Graph.of(
        {"user": validated_nodes(2, ids=["007", "8"]), "item": validated_nodes(3, ids=[7, 8, 9])},
        {buys: validated_edges([[0, 1], [2, 0]], num_src=2, num_dst=3)},
    )
    assert [str(kind) for kind in id_columns(graph, buys).values()] == ["string", "int64"]
    (tmp_path / "pairs.csv").write_text("src,dst\n007,9\n8,7\n")
    assert _read_pairs(tmp_path / "pairs.csv", graph, buys) == {"src": ["007", "8"], "dst": [9, 7]}
    (tmp_path / "pairs.csv").write_text("src,dst\n007,nine\n")
    with pytest.raises(InputError, match="expected a CSV or Parquet file with columns src and dst"):
        _read_pairs(tmp_path / "pairs.csv", graph, buys)
