"""Event runs through gf.train and the command line: train, resume, evaluate, score new events."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gnnfleet as gf
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.inference import query
from gnnfleet.strategies.protocol import RANK_LOCAL
from gnnfleet.training.checkpoint import load_checkpoint, load_rank_local
from tests.shell import call, fails, torchrun

SETTINGS: dict[str, Any] = {
    "strategy": {"name": "temporal", "batch": 60, "static_epochs": 1},
    "model": {"hidden": 8, "neighbours": 3, "time_width": 4},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events")
    graph = make_dataset("events", users=30, items=60, events=600, features=2, seed=2)
    gf.save(graph, folder / "store")
    gf.train(
        folder / "store", config=SETTINGS, strategy=SETTINGS["strategy"], epochs=2, run_dir=folder / "uninterrupted"
    )
    return folder


def test_the_record_has_edgebank_besides_the_metric(runs: Path) -> None:
    record = json.loads((runs / "uninterrupted" / "record.json").read_text())
    assert record["strategy"] == "temporal" and record["model"] == "tgn" and record["metrics"]["name"] == "mrr"
    assert set(record["metrics"]["beside"]["test"]) == {"ap", "edgebank", "edgebank_window"}
    done = call("evaluate", runs / "uninterrupted", "--json")
    answer = json.loads(done.stdout)
    assert answer["value"] == pytest.approx(record["metrics"]["test"], rel=1e-6)
    assert answer["events"] == 90 and answer["metrics"]["edgebank"] == record["metrics"]["beside"]["test"]["edgebank"]


def test_a_resumed_run_equals_an_uninterrupted_one(runs: Path) -> None:
    settings = {"config": SETTINGS, "strategy": SETTINGS["strategy"], "run_dir": runs / "resumed"}
    gf.train(runs / "store", epochs=1, **settings)
    gf.train(runs / "store", epochs=2, resume=True, **settings)
    paths = [runs / run / "checkpoints" / "last" for run in ("uninterrupted", "resumed")]
    states = [load_checkpoint(path)[0] | load_rank_local(path, 0) for path in paths]
    assert set(states[0]) == {"model", "optimizer", "trained", RANK_LOCAL} and "memory/mail" in states[0][RANK_LOCAL]
    for part, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][part][name]), (part, name)


def test_ranks_of_torchrun_that_share_batches_train_as_one(runs: Path) -> None:
    options = ["--strategy", "temporal", "--run-dir", str(runs / "ranks"), "--json", "--set=strategy.batch_parallel=2"]
    for part, values in SETTINGS.items():
        options += [f"--set={part}.{key}={value}" for key, value in values.items() if key != "name"]
    done = torchrun("train", runs / "store", *options, "--set=train.epochs=2")
    assert done.returncode == 0, done.stderr
    record, alone = json.loads(done.stdout), json.loads((runs / "uninterrupted" / "record.json").read_text())
    assert record["workers"] == 2 and record["steps"] == alone["steps"]
    states = [load_checkpoint(runs / run / "checkpoints" / "last")[0]["model"] for run in ("ranks", "uninterrupted")]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_several_workers_cannot_evaluate_an_event_stream(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "by one process; found 2: use --workers 1, not torchrun"
    assert message in fails("evaluate", runs / "uninterrupted", "-w", "2", code=2)
    assert message in fails("predict", runs / "uninterrupted", "-w", "2", "-o", runs / "none.parquet", code=2)
    rendezvous = SimpleNamespace(store=SimpleNamespace(set=lambda *_: pytest.fail("nothing is prepared")))
    monkeypatch.setattr(query, "run_rank", lambda env, work, print_errors: work(World(), rendezvous))
    evaluation = query.Query(run=str(runs / "uninterrupted"), split="test")
    with pytest.raises(ConfigError, match=message):
        query.run_query_as_rank(
            LaunchEnv(rank=0, size=2), evaluation, lambda: pytest.fail("no store is read"), quiet=True, show=print
        )


def test_new_events_are_scored_from_a_table(runs: Path, tmp_path: Path) -> None:
    last = int(EventStream.of(gf.open(runs / "store")).t[-1])
    table = {"src": [3, 1, 2], "dst": [5, 50, 9], "time": [last + 9, last + 5, last + 5]}
    features = {"a": [0.1, 0.2, 0.3], "b": [1.0, 2.0, 3.0]}
    pq.write_table(pa.table({**table, **features}), tmp_path / "new.parquet")
    done = call("predict", runs / "uninterrupted", "--events", tmp_path / "new.parquet", "-o", tmp_path / "out.parquet")
    assert done.returncode == 0, done.stderr
    scores = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert scores["src"] == [1, 2, 3] and scores["time"] == [last + 5, last + 5, last + 9]
    assert all(0 < value < 1 for value in scores["probability"])
    wrong = {
        "no column time": {"src": [1], "dst": [1]},
        "have 2 features, found 0": table,
        "no node with id 99": {**table, "src": [99, 1, 2], **features},
        "must not be earlier than the last event": {**table, "time": [0, 0, 0], **features},
    }
    for message, columns in wrong.items():
        pq.write_table(pa.table(columns), tmp_path / "wrong.parquet")
        done = call(
            "predict", runs / "uninterrupted", "--events", tmp_path / "wrong.parquet", "-o", tmp_path / "none.parquet"
        )
        assert done.returncode == 3 and message in done.stderr and not (tmp_path / "none.parquet").exists(), done.stderr


def test_features_of_new_events_are_found_by_name(tmp_path: Path) -> None:
    """In any order, besides text that import does not read either; errors name file and columns."""
    rows = [f"u{i % 7},v{i % 5},{i},{i % 3},{i % 4},note" for i in range(60)]
    (tmp_path / "events.csv").write_text("\n".join(["src,dst,time,amount,mood,note", *rows]) + "\n")
    done = call("import", tmp_path / "events.csv", "-o", tmp_path / "store")
    assert done.returncode == 0 and "2 features (amount, mood)" in done.stdout, (done.stdout, done.stderr)
    short = {"model": SETTINGS["model"], "strategy": {**SETTINGS["strategy"], "static": False}}
    gf.train(tmp_path / "store", config=short, strategy=short["strategy"], epochs=1, run_dir=tmp_path / "run")
    file, out = tmp_path / "new.csv", tmp_path / "out.parquet"
    probabilities = []
    for text in (
        "src,dst,time,amount,mood\nu1,v2,100,1,3\nu2,v1,101,0,2\n",
        "src,note,mood,dst,time,other,amount\nu1,a,3,v2,100,7,1\nu2,b,2,v1,101,8,0\n",
    ):
        file.write_text(text)
        done = call("predict", tmp_path / "run", "--events", file, "-o", out)
        assert done.returncode == 0, done.stderr
        probabilities.append(pq.read_table(out)["probability"].to_pylist())
    assert probabilities[0] == probabilities[1]
    for text, message in (
        ("src,dst,time,amount\nu1,v2,100,1\n", "features amount, mood, found columns src, dst, time, amount: add mood"),
        ("src,dst,time,amount,mood\nu1,v2,100,1,fine\n", "column 'mood': features of events are numbers or lists"),
        ("src,dst,time,amount,mood\nu1,v2,100,1,\nu1,v2,100,1,2\n", "column 'mood': expected numbers"),
    ):
        file.write_text(text)
        done = call("predict", tmp_path / "run", "--events", file, "-o", tmp_path / "none.parquet")
        assert done.returncode == 3 and f"error: {file}" in done.stderr and message in done.stderr, done.stderr


def test_times_of_new_events_are_read_as_import_reads_them(tmp_path: Path) -> None:
    """Dates become microseconds since 1970, and are written as dates again."""
    days = [f"2026-01-{day:02} 10:00:{second:02}" for day in range(1, 31) for second in (0, 30)]
    rows = [f"u{i % 7},v{i % 5},{day}" for i, day in enumerate(days)]
    (tmp_path / "events.csv").write_text("\n".join(["src,dst,time", *rows]) + "\n")
    (tmp_path / "new.csv").write_text("src,dst,time\nu1,v2,2026-02-01 08:00:00\nu2,v1,2026-01-31 08:00:00\n")
    done = call("import", tmp_path / "events.csv", "-o", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    short = {"model": SETTINGS["model"], "strategy": {**SETTINGS["strategy"], "static": False}}
    gf.train(tmp_path / "store", config=short, strategy=short["strategy"], epochs=1, run_dir=tmp_path / "run")
    done = call("predict", tmp_path / "run", "--events", tmp_path / "new.csv", "-o", tmp_path / "out.parquet")
    assert done.returncode == 0, done.stderr
    scores = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert scores["src"] == ["u2", "u1"] and [str(time) for time in scores["time"]] == [
        "2026-01-31 08:00:00",
        "2026-02-01 08:00:00",
    ]
    for text, message in (("yesterday", "time"), ("", "no time")):
        (tmp_path / "wrong.csv").write_text(f"src,dst,time\nu1,v2,{text}\n")
        done = call("predict", tmp_path / "run", "--events", tmp_path / "wrong.csv", "-o", tmp_path / "none.parquet")
        assert done.returncode == 3 and message in done.stderr and not (tmp_path / "none.parquet").exists(), done.stderr


def test_a_record_scores_later_events() -> None:
    graph = make_dataset("events", users=20, items=12, events=300, features=0, seed=2)
    record = gf.train(graph, strategy="temporal", config={"model": SETTINGS["model"]}, static_epochs=1, epochs=1)
    last = int(EventStream.of(graph).t[-1])
    assert record.score([(0, 1, last + 1), (3, 2, last + 2)]).shape == (2,)
    assert record.score([]).shape == (0,)
    with pytest.raises(InputError, match="must not be earlier than the last event"):
        record.score([(0, 1, last)])
    with pytest.raises(ConfigError, match="predicts events"):
        record.embeddings()
    with pytest.raises(ConfigError, match="predicts events"):
        record.predict()
