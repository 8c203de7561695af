"""Questions to trained runs, answered by one process or by several, each with a part of the graph: the same answers."""

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

WORDS: dict[str, Any] = {"epochs": 3, "precision": "float64", "seed": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sar on two workers with learnable rows, one of local, and one on links; all on one store."""
    path = tmp_path_factory.mktemp("asked")
    save_store(communities(), path / "shop")
    model = {"name": "sage", "hidden": 8, "layers": 2, "embedding": 4}
    train(path / "shop", strategy="sar", workers=2, model=model, run_dir=path / "two", **WORDS)
    train(path / "shop", model=model, run_dir=path / "one", **WORDS)
    links = {"task": "link", "split": "0.8/0.1/0.1", "link.exclude": "none", "link.ranking": "sampled"}
    train(path / "shop", model=model, run_dir=path / "links", **WORDS, **links)
    return path


def same(one: Path, two: Path) -> None:
    found, wanted = pq.read_table(one), pq.read_table(two)
    assert found.schema == wanted.schema and found.num_rows == wanted.num_rows
    for name in found.column_names:
        left, right = found[name].to_pylist(), wanted[name].to_pylist()
        if isinstance(left[0], str):
            assert left == right, name
        else:
            torch.testing.assert_close(
                torch.tensor(left), torch.tensor(right), msg=lambda text, name=name: f"{name} {text}"
            )


def measured(run: Path, workers: int | None) -> dict[str, Any]:
    return run_query(Query(run=str(run), split="test"), open_store(run.parent / "shop"), workers=workers)


def test_a_metric_on_any_number_of_workers(runs: Path) -> None:
    """torchrun asks a run of two workers, below."""
    alone, spread = (measured(runs / "one", count) for count in (1, 2))
    for word in ("loss", "value", "metrics"):
        assert alone.pop(word) == pytest.approx(spread.pop(word), rel=1e-10)
    assert alone == spread and alone["nodes"] == 240 and alone["split"] == "test"


def test_predictions_on_other_workers(runs: Path, tmp_path: Path) -> None:
    for count in (1, 3):  # trained on two
        out = str(tmp_path / f"{count}.parquet")
        asked = Query(run=str(runs / "two"), output=out, embeddings=True, logits=True)
        assert run_query(asked, open_store(runs / "shop"), workers=count)["rows"] == 300
    same(tmp_path / "3.parquet", tmp_path / "1.parquet")
    assert len(list(tmp_path.iterdir())) == 2


def test_links_on_two_workers(runs: Path, tmp_path: Path) -> None:
    graph, run = open_store(runs / "shop"), str(runs / "links")
    (tmp_path / "pairs.csv").write_text("src,dst\nn1,n2\nn7,n3\nn1,n299\n")
    for count in (1, 2):
        asked = Query(run=run, pairs=str(tmp_path / "pairs.csv"), output=str(tmp_path / f"{count}.parquet"))
        assert run_query(asked, graph, workers=count)["rows"] == 3
    same(tmp_path / "2.parquet", tmp_path / "1.parquet")


def test_what_cannot_be_answered(runs: Path, tmp_path: Path) -> None:
    line = ["predict", runs / "two", "--pairs", tmp_path / "none.csv", "-o", tmp_path / "out.parquet"]
    for words, text in (
        (["evaluate", runs / "two", "-w", "0"], "--workers is a number from 1, found 0"),
        ([*line, "-w", "2"], "pairs are scored by a run with --task link"),
    ):
        done = call(*words)
        assert done.returncode == 2 and text in done.stderr
    assert not list(tmp_path.iterdir())


def test_as_ranks_of_torchrun(runs: Path) -> None:
    done = torchrun("evaluate", runs / "two", "--json")
    assert done.returncode == 0, done.stderr
    found, alone = json.loads(done.stdout), run_json("evaluate", runs / "two", "-w", "1")
    assert found.pop("metrics") == pytest.approx(alone.pop("metrics"), rel=1e-10)
    assert found.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-10)
    assert found == alone
