"""Tasks from tables to predictions: values to predict, class weights, runs that learn nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from torch import Tensor

import gnnfleet as gf
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.export import export_tables
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.ingest.npz import read_npz
from gnnfleet.graph.store import open_store, save_store
from tests.graphs import communities
from tests.shell import call, run_json

NODES = 240


def houses() -> tuple[Tensor, Tensor, Tensor]:
    """Features, two values that follow from them (some missing), edges."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 3, generator=random)
    y = torch.stack([1000 + 100 * (2 * x[:, 0] - x[:, 1]), 5 * x[:, 2] + x[:, 0]], 1).float()
    y[::9, 0], y[5::9] = torch.nan, torch.nan
    return x, y, torch.randint(0, NODES, (2, 500), generator=random)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, (x, y, edges) = tmp_path_factory.mktemp("tables"), houses()
    ids = [f"h{i}" for i in range(NODES)]
    columns = {"id": ids, **{f"f{i}": x[:, i].numpy() for i in range(3)}}
    columns |= {name: pa.array(y[:, i].numpy(), from_pandas=True) for i, name in enumerate(("price", "area"))}
    pa_csv.write_csv(pa.table(columns), folder / "nodes.csv")
    ends = {end: [f"h{i}" for i in edges[row].tolist()] for row, end in enumerate(("src", "dst"))}
    pa_csv.write_csv(pa.table(ends), folder / "edges.csv")
    return folder


def test_a_regression_from_tables_to_predictions(tables: Path, tmp_path: Path) -> None:
    store, run_dir, output = tmp_path / "store", tmp_path / "run", tmp_path / "out.parquet"
    sources = [tables / "nodes.csv", tables / "edges.csv", "-o", store, "--features", "f*"]
    counts = run_json("import", *sources, "--value", "price,area", "--split", "0.6/0.2/0.2", "--quiet")
    assert counts["nodes"]["node"]["labelled"] == 213
    _, y, _ = houses()
    stored = open_store(store).single_nodes
    torch.testing.assert_close(stored.y, y, equal_nan=True)
    assert stored.regression and stored.classes == ("price", "area") and stored.num_classes == 2
    assert (stored.split >= 0).sum() == (~y.isnan()).any(1).sum()  # type: ignore[operator]
    options = ["--set", "train.metric=r2,mae,rmse", "--set", "model.hidden=32", "--set", "model.dropout=0"]
    record = run_json("train", store, *options, "--set", "train.epochs=80", "--run-dir", run_dir, "--quiet")
    assert record["metrics"]["name"] == "r2" and record["metrics"]["test"] > 0.9
    assert run_json("predict", run_dir, "-o", output)["rows"] == NODES
    predicted = pa.parquet.read_table(output)
    assert predicted.column_names == ["id", "prediction_price", "prediction_area"]
    assert predicted["id"].to_pylist() == [f"h{i}" for i in range(NODES)]
    values = np.stack([predicted[f"prediction_{name}"].to_numpy() for name in ("price", "area")], 1)
    test = stored.mask("test").numpy()
    error = np.abs(values - y.numpy())[test]
    assert np.nanmean(error, 0).mean() == pytest.approx(record["metrics"]["beside"]["test"]["mae"], rel=1e-4)
    answer = run_json("evaluate", run_dir, "--split", "test")
    assert answer["metrics"]["rmse"] == pytest.approx(record["metrics"]["beside"]["test"]["rmse"], rel=1e-6)
    loaded = gf.load_run(run_dir)
    assert loaded.predict(["h3"])[0] == pytest.approx(values[3].tolist(), rel=1e-5)
    export_tables(open_store(store), tmp_path / "back")
    back = [tmp_path / "back" / name for name in ("nodes.parquet", "edges.parquet")]
    again = run_json("import", *back, "-o", tmp_path / "again", "--value", "label_*", "--quiet")
    assert again["nodes"]["node"]["labelled"] == 213
    torch.testing.assert_close(open_store(tmp_path / "again").single_nodes.y, y, equal_nan=True)
    with pytest.raises(ConfigError, match="no metric 'accuracy' of values"):
        gf.train(open_store(store), metric="accuracy")


def test_values_come_back_from_other_formats(tables: Path, tmp_path: Path) -> None:
    x, y, edges = houses()
    np.savez(tmp_path / "g.npz", x=x.numpy(), y=y[:, 0].numpy(), edge_index=edges.numpy())
    torch.testing.assert_close(read_npz(tmp_path / "g.npz").single_nodes.y, y[:, 0], equal_nan=True)
    graph = save_store(Graph(edges, x=x, y=y), tmp_path / "store")
    assert open_store(tmp_path / "store").single_nodes.y.dtype == torch.float32  # type: ignore[union-attr]
    torch.testing.assert_close(gf.to_pyg(graph).y, y, equal_nan=True)
    torch.testing.assert_close(gf.from_pyg(gf.to_pyg(graph)).single_nodes.y, y, equal_nan=True)
    whole = Graph(edges, x=x, y=torch.arange(NODES) % 7 * 1.0, split=torch.arange(NODES) % 3)
    assert whole.single_nodes.y.dtype == torch.int64  # type: ignore[union-attr]
    record = gf.train(whole, objective="regression", loss="l1", epochs=2, quiet=True, strategy="sar", workers=1)
    assert record.metrics["name"] == "mae" and isinstance(record.predict()[0], float)
    for bad, message in (
        ({"objective": "classification"}, "which have fractions"),
        ({"class_weights": "balanced"}, "these labels are values"),
        ({"split": "20-per-class"}, "found values"),
    ):
        with pytest.raises(ConfigError, match=message):
            gf.train(graph, quiet=True, **{"split": "0.6/0.2/0.2", **bad})
    with pytest.raises(InputError, match="finite numbers"):
        gf.train(Graph(edges, x=x, y=torch.full((NODES,), torch.inf)), split="0.6/0.2/0.2")


def test_a_run_that_learns_nothing_fails_and_keeps_its_files(tmp_path: Path) -> None:
    save_store(communities(), tmp_path / "store")
    options = ["--run-dir", tmp_path / "run", "--json", "--set", "train.epochs=30", "--set", "model.hidden=16"]
    done = call("train", tmp_path / "store", *options, "--set", "train.lr=1000", "--set", "auto_defaults=false")
    assert done.returncode == 7
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "nothing was learnt: test accuracy" in line and "try a smaller train.lr (now 1000)" in line
    record = json.loads(done.stdout)
    assert record["failure"] in line and record == json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["metrics"]["per_class"]["classes"] == list(open_store(tmp_path / "store").single_nodes.classes)
    assert run_json("evaluate", tmp_path / "run")["per_class"]["support"]


@pytest.mark.parametrize(("settings", "failure", "remark"), [
    ({"epochs": 4, "lr": 1000.0}, "", ""),
    ({"epochs": 25, "lr": 0.01}, "", ""),
    ({"epochs": 25, "lr": 0.01, "objective": "regression"}, "", ""),
    ({"epochs": 25, "lr": 1e-7}, "more epochs or a larger", ""),
    ({"epochs": 10, "lr": 1e4}, "a smaller lr", ""),
    ({"epochs": 12, "lr": 0.01, "y": "rare"}, "", "All 60 test nodes are predicted as class 0, which 5"),
])  # fmt: skip
def test_only_long_runs_without_success_fail(
    settings: dict[str, Any], failure: str, remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gnnfleet")
    graph = communities()
    graph = graph.with_nodes("node", classes=(), split=None)
    if settings.pop("y", "") == "rare":
        y = (torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.04).long()
        graph = graph.with_nodes("node", y=y)
    options = {"split": "0.6/0.2/0.2", "model": gf.nn.SAGE(hidden=16, layers=2), **settings}
    if not failure:
        record = gf.train(graph, **options)
        assert not record.summary.failure and "failure" not in record.summary.as_json()
    else:
        with pytest.warns(RuntimeWarning, match=failure):
            record = gf.train(graph, **options)
        assert "nothing was learnt" in record.summary.failure
    assert remark in caplog.text
    assert ("predicted as class" in caplog.text) is bool(remark)


def test_an_exploded_loss_of_links_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gnnfleet")
    options: dict[str, Any] = {"task": "link", "split": "0.8/0.1/0.1", "model": gf.nn.SAGE(hidden=16, layers=2)}
    for lr, exploded in ((0.01, False), (1e3, True)):
        gf.train(communities(), epochs=6, lr=lr, **options)
        assert ("of the first epoch: try a smaller lr" in caplog.text) is exploded
