"""Queries to trained runs have the same answers from one process and from several, each with a part of the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.api import train
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.query import Query, run_query
from tests.graphs import communities
from tests.shell import call, run_json, torchrun

SETTINGS: dict[str, Any] = {"epochs": 3, "precision": "float64", "seed": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sar on two workers with learnable rows, one of local, and one on links; all on one store."""
    path = tmp_path_factory.mktemp("queries")
    save_store(communities(), path / "shop")
    model = {"name": "sage", "hidden": 8, "layers": 2, "embedding": 4}
    train(path / "shop", strategy="sar", workers=2, model=model, run_dir=path / "two", **SETTINGS)
    train(path / "shop", model=model, run_dir=path / "one", **SETTINGS)
    links = {"task": "link", "split": "0.8/0.1/0.1", "link.exclude": "none", "link.ranking": "sampled"}
    train(path / "shop", model=model, run_dir=path / "links", **SETTINGS, **links)
    return path


def assert_same_table(path: Path, expected_path: Path) -> None:
    table, expected = pq.read_table(path), pq.read_table(expected_path)
    assert table.schema == expected.schema and table.num_rows == expected.num_rows
    for name in table.column_names:
        values, expected_values = table[name].to_pylist(), expected[name].to_pylist()
        if isinstance(values[0], str):
            assert values == expected_values, name
        else:
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(expected_values), msg=lambda text, name=name: f"{name} {text}"
            )


def evaluate(run: Path, workers: int | None) -> dict[str, Any]:
    return run_query(Query(run=str(run), split="test"), open_store(run.parent / "shop"), workers=workers)


def test_metrics_do_not_depend_on_the_number_of_workers(runs: Path) -> None:
    single, distributed = (evaluate(runs / "one", workers) for workers in (1, 2))
    for key in ("loss", "value", "metrics"):
        assert single.pop(key) == pytest.approx(distributed.pop(key), rel=1e-10)
    assert single == distributed and single["nodes"] == 240 and single["split"] == "test"


def test_predictions_do_not_depend_on_the_number_of_workers(runs: Path, tmp_path: Path) -> None:
    for workers in (1, 3):  # trained on two
        out = str(tmp_path / f"{workers}.parquet")
        query = Query(run=str(runs / "two"), output=out, embeddings=True, logits=True)
        assert run_query(query, open_store(runs / "shop"), workers=workers)["rows"] == 300
    assert_same_table(tmp_path / "3.parquet", tmp_path / "1.parquet")
    assert len(list(tmp_path.iterdir())) == 2


def test_scores_of_pairs_do_not_depend_on_the_number_of_workers(runs: Path, tmp_path: Path) -> None:
    graph, run = open_store(runs / "shop"), str(runs / "links")
    (tmp_path / "pairs.csv").write_text("src,dst\nn1,n2\nn7,n3\nn1,n299\n")
    for workers in (1, 2):
        query = Query(run=run, pairs=str(tmp_path / "pairs.csv"), output=str(tmp_path / f"{workers}.parquet"))
        assert run_query(query, graph, workers=workers)["rows"] == 3
    assert_same_table(tmp_path / "2.parquet", tmp_path / "1.parquet")


def test_impossible_queries_are_refused(runs: Path, tmp_path: Path) -> None:
    predict = ["predict", runs / "two", "--pairs", tmp_path / "none.csv", "-o", tmp_path / "out.parquet"]
    for command, text in (
        (["evaluate", runs / "two", "-w", "0"], "--workers is a number from 1, found 0"),
        ([*predict, "-w", "2"], "pairs are scored by a run with --task link"),
    ):
        done = call(*command)
        assert done.returncode == 2 and text in done.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_of_torchrun_and_one_process_give_the_same_metrics(runs: Path) -> None:
    done = torchrun("evaluate", runs / "two", "--json")
    assert done.returncode == 0, done.stderr
    distributed, single = json.loads(done.stdout), run_json("evaluate", runs / "two", "-w", "1")
    for key in ("loss", "metrics"):
        assert distributed.pop(key) == pytest.approx(single.pop(key), rel=1e-10)
    assert distributed == single
