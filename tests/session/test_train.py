"""The command line trains, saves, resumes, evaluates and predicts; a kill at any moment changes no bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.api import train
from gnnfleet.cli.output import print_result
from gnnfleet.cli.train import _summary
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.report.metrics import read_metrics
from gnnfleet.report.run_reader import read_run, summarize
from gnnfleet.report.run_record import RunRecord
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import run_training
from gnnfleet.training.run_dir import RunDirectory
from tests.graphs import CLASSES, assert_same_checkpoint, communities
from tests.report.runs import write_run
from tests.shell import fails, run_json, start

MODEL = ["--model", "sage", "--set", "model.hidden=32", "--set", "model.layers=2", "--set", "model.norm=batch"]
SETTINGS: dict[str, Any] = {"model": {"name": "sage", "hidden": 32, "layers": 2, "norm": "batch"}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shop"
    save_store(communities(1500), path)
    return path


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("runs") / "one"
    settings = ["--set", "train.epochs=30", "--set", "report.memory=true", "--seed", "4", "--run-dir", path]
    return path, run_json("train", store, "--strategy", "local", "--workers", "1", *MODEL, *settings)


def test_the_summary_and_the_report_show_the_same_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [1.0, 9.0, 2.0, 3.0]
    metrics = {"train_loss": 0.5, "val": 0.5, "test": 0.5, "name": "accuracy", "best_epoch": 1}
    fields: dict[str, Any] = {"strategy": "local", "workers": 1, "model": "sage", "seed": 0, "epochs": 4, "steps": 4}
    record = RunRecord(**fields, seconds_per_epoch=seconds, metrics=metrics, memory={"peak_rss": [1]})
    print_result({}, as_json=False, human=_summary("shop", record))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "median" in line)
    rows = [{"epoch": i + 1, "train_loss": 0.5, "seconds": value} for i, value in enumerate(seconds)]
    assert summarize(read_run(write_run(tmp_path / "run", metrics=rows)))["epoch_seconds"] == 2.5 and "2.500" in line


def test_the_record_has_every_field(finished: tuple[Path, dict[str, Any]]) -> None:
    path, record = finished
    assert list(record) == [
        "strategy", "workers", "model", "seed", "epochs", "steps", "seconds_per_epoch", "metrics", "traffic", "memory",
        "run_dir", "versions",
    ]  # fmt: skip
    assert record["strategy"] == "local" and record["workers"] == 1 and record["model"] == "sage"
    assert record["epochs"] == record["steps"] == len(record["seconds_per_epoch"]) == 30
    assert record["metrics"].keys() >= {"train_loss", "val", "test", "name"} and record["metrics"]["name"] == "accuracy"
    assert record["traffic"] == {"bytes_sent": [0], "rounds": [0]}
    assert record["memory"].keys() == {"peak_rss", "rss_growth", "own_rss", "peak_tensors"}
    assert 0 < record["memory"]["peak_tensors"][0] < record["memory"]["peak_rss"][0]
    assert record["versions"].keys() >= {"gnnfleet", "torch", "python"} and record["run_dir"] == str(path)
    assert json.loads((path / "record.json").read_text()) == record
    assert [row["epoch"] for row in read_metrics(path / "metrics.jsonl")] == list(range(1, 31))
    assert json.loads((path / "config.json").read_text())["config"]["model"]["hidden"] == 32
    assert record["metrics"]["test"] > 0.7


def test_python_and_command_line_give_the_same_bits(
    store: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    record = train(store, **SETTINGS, epochs=30, seed=4, run_dir=tmp_path / "two")
    for name in ("last", "best"):
        assert_same_checkpoint(finished[0] / "checkpoints" / name, tmp_path / "two" / "checkpoints" / name)
    assert record.metrics == finished[1]["metrics"]


def test_evaluate_repeats_the_record(finished: tuple[Path, dict[str, Any]]) -> None:
    path, record = finished
    answer = run_json("evaluate", path, "--split", "test")
    assert answer["value"] == record["metrics"]["test"] and answer["name"] == "accuracy"
    assert answer["epoch"] == record["metrics"]["best_epoch"] and answer["checkpoint"] == "best"


def test_predictions_have_original_ids(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, record = finished
    output = tmp_path / "out" / "predictions.parquet"
    output.parent.mkdir()
    assert run_json("predict", path, "-o", output, "--embeddings", "--logits")["rows"] == 1500
    rows = pq.read_table(output)
    assert rows.column_names == ["id", "prediction", "probability", "logits", "embedding"]
    assert rows["id"].to_pylist() == [f"n{i}" for i in range(1500)]
    nodes = communities(1500).single_nodes
    assert nodes.y is not None
    is_correct = torch.tensor(
        [name == CLASSES[y] for name, y in zip(rows["prediction"].to_pylist(), nodes.y.tolist(), strict=True)]
    )
    assert float(is_correct[nodes.mask("test")].double().mean()) == pytest.approx(record["metrics"]["test"])
    assert len(rows["logits"][0]) == 10 and len(rows["embedding"][0]) == 32
    logits = torch.tensor(rows["logits"].to_pylist())
    torch.testing.assert_close(torch.tensor(rows["probability"].to_pylist()), logits.softmax(1).amax(1))
    assert [p.name for p in output.parent.iterdir()] == ["predictions.parquet"]


def test_kills_change_no_bit(store: Path, tmp_path: Path) -> None:
    options = {"train.epochs": 70, "train.checkpoint_seconds": 0.03, "train.patience": 65}
    train(store, **SETTINGS, seed=2, run_dir=tmp_path / "whole", **options)
    draw, path = random.Random("kills"), tmp_path / "killed"
    settings = [f"--set={key}={value}" for key, value in options.items()]
    command = ["train", store, *MODEL, *settings, "--seed", "2", "--run-dir", path, "--resume", "--json"]
    for _ in range(2):
        before = len(read_metrics(path / "metrics.jsonl"))
        process = start(*command)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            rows = read_metrics(path / "metrics.jsonl")
            if rows and len(rows) != before:
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    record = run_json(*command[:-1])
    for name in ("last", "best"):
        assert_same_checkpoint(path / "checkpoints" / name, tmp_path / "whole" / "checkpoints" / name)
    rows, uninterrupted = (read_metrics(p / "metrics.jsonl") for p in (path, tmp_path / "whole"))
    assert [(row["epoch"], row["train_loss"], row["val"]) for row in rows] == [
        (row["epoch"], row["train_loss"], row["val"]) for row in uninterrupted
    ]
    assert len(record["seconds_per_epoch"]) == record["epochs"] == len(uninterrupted)


def test_a_run_is_saved_below_runs_by_default(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph, settings = open_store(store), {**SETTINGS, "train": {"epochs": 1}}
    run_dirs = [run_training(graph, settings, location=RunLocation(keep=True)).record.run_dir for _ in range(2)]
    assert run_dirs == ["runs/shop-sage-1", "runs/shop-sage-2"]
    assert (tmp_path / "runs" / "last").resolve().name == "shop-sage-2"
    resumed = run_training(graph, {"train": {"epochs": 3}}, location=RunLocation(keep=True, resume=True)).record
    assert resumed.epochs == 3 and str(resumed.run_dir).endswith("shop-sage-2")


def test_invalid_options_write_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean train.epochs" in fails("train", store, "--set", "train.epoch=3", code=2)
    with pytest.raises(ConfigError, match="split 3 does not exist: this graph has splits 0 to 0"):
        run_training(open_store(store), {"split": 3}, location=RunLocation(keep=True))
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_its_model_and_store(store: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path = finished[0]
    with pytest.raises(ConfigError, match="is not empty"):
        train(store, **SETTINGS, run_dir=path)
    with pytest.raises(ConfigError, match=r"started with model=\{\"hidden\": 32\}"):
        train(store, model={"hidden": 8}, run_dir=path, resume=True)
    other = save_store(Graph([[0, 1], [1, 0]], x=[[0.0], [1.0]], y=[0, 1], split=[0, 1]), tmp_path / "other")
    with pytest.raises(RunError, match="changed since the run started"):
        train(other, run_dir=path, resume=True)
    assert "trained on 64 features per node, this store has 1" in fails(
        "evaluate", path, "--store", tmp_path / "other", code=7
    )
    with pytest.raises(RunError, match="is not a run"):
        RunDirectory(tmp_path).open_graph()


@pytest.mark.parametrize(
    ("strategy", "workers", "advice"),
    [
        ("local", 1, "for strategy local use evaluation_memory=SIZE"),
        ("tma", 2, "for strategy tma use evaluation_memory=SIZE"),
        ("macrobatch", 2, "for strategy macrobatch use feature_memory=SIZE"),
        ("pipe", 2, "for strategy pipe leave it out; gnnfleet plan"),
    ],
)
def test_a_memory_budget_that_a_strategy_does_not_keep_is_refused(strategy: str, workers: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"memory is the budget of a worker of sar, and of plans; {advice}"):
        train(communities(60), strategy=strategy, workers=workers, epochs=1, memory="1GiB")


def test_the_plan_translates_a_memory_budget_for_the_strategy_it_selects() -> None:
    record = train(communities(60), strategy="auto", model={"name": "sage", "hidden": 8}, epochs=1, memory="3GiB")
    assert record.config.memory is None and record.config.evaluation_memory == 3 << 30
