"""Strategies side by side: trained alike, equal to local where that is their aim, on one page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.analysis import compare
from gnnfleet.analysis.compare import (
    Comparison,
    EqualityCheck,
    _non_default_settings,
    one_epoch_steps,
    parse_strategies,
    split_settings,
)
from gnnfleet.config.resolve import flatten, parse_value, resolve, unflatten
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.report.metrics import read_metrics
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import run_training
from gnnfleet.strategies.local.config import LocalConfig
from tests.graphs import communities
from tests.shell import fails, run_json

WORDS = ("--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=3", "-q")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "store"
    save_store(communities(), path)
    return path


def train_here(store: Path, config: RunConfig, run_dir: Path, **_: Any) -> None:
    """In this process: a new one takes seconds to load torch."""
    run_training(open_store(store), config.model_dump(mode="json"), place=RunLocation(run_dir))


def test_exact_ones_equal_local(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_train", train_here)
    out = tmp_path / "out"
    found = run_json("compare", store, *WORDS, "-w", "1", "--strategies", "local,sar,macrobatch", "-o", out)
    local, sar, sampled = found["runs"]
    assert [run["strategy"] for run in found["runs"]] == ["local", "sar", "macrobatch"]
    assert local["test"] == sar["test"] and local["difference"] is None
    assert sar["equals_local"] and sar["difference"] < 1e-9
    assert sampled["equals_local"] and sampled["loss"] != local["loss"], "compared with local on the same samples"
    page = (out / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["local", "sar", "macrobatch"]
    assert data["runs"][1]["equals"].startswith("yes")
    assert "not empty" in fails("compare", store, *WORDS, "-o", out, code=2)
    (out / "mine").touch()
    said = fails("compare", store, *WORDS, "--overwrite", "-o", out, code=2)
    assert "not empty" in said and "or --overwrite" not in said
    assert (out / "strategies" / "sar").is_dir(), "what somebody has added is a reason to leave all of it"


def test_other_weights_are_seen(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to equal local is compared with it: a counterpart that samples is another training."""
    monkeypatch.setattr(compare, "_train", train_here)
    monkeypatch.setattr(compare, "reference_config", lambda config, layers: LocalConfig(fanouts=(2,) * layers))
    contest = Comparison(store, tmp_path, ["sar"], 1, {"model": {"hidden": 8, "layers": 2}})
    verdict = compare.check_all(contest, ["sar"])["sar"]
    assert verdict.difference is not None and verdict.difference > 1e-6 and not verdict.equals


def test_what_could_not_be_checked_is_said(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of what was trained is not lost for it."""

    def train(store: Path, config: RunConfig, run_dir: Path, **words: Any) -> None:
        if config.precision == "float64":
            raise ConfigError("a worker needs 1.4 GiB at least")
        train_here(store, config, run_dir)

    monkeypatch.setattr(compare, "_train", train)
    found = run_json("compare", store, *WORDS, "-w", "1", "--strategies", "local,sar", "-o", tmp_path / "out")
    assert [run["strategy"] for run in found["runs"]] == ["local", "sar"]
    assert found["runs"][1]["equals_local"] is None and found["runs"][1]["not_checked"].startswith("a worker needs")
    assert "not checked: a worker needs 1.4 GiB" in (tmp_path / "out" / "page.html").read_text()


def test_workers_and_partition_of_a_config(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition is for those that have parts; a strategy that the file is about is none of those compared."""
    monkeypatch.setattr(compare, "_train", train_here)
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text('workers = 1\n[strategy]\nname = "tma"\ninterval = 3.0\n')
    line = ["compare", store, *WORDS, "--config", file, "--strategies", "local,sar", "--no-check", "-o", out]
    found = run_json(*line, "--set", "partition=random")
    assert [run["workers"] for run in found["runs"]] == [1, 1] and "equals_local" not in found["runs"][1]
    kept = [json.loads((out / "strategies" / name / "config.json").read_text()) for name in ("local", "sar")]
    assert [about["config"]["partition"] for about in kept] == [None, "random"]
    file.write_text('workers = "two"\n')
    said = fails("compare", store, "--config", file, "--strategies", "sar", "-o", tmp_path / "none", code=2)
    assert "workers='two'" in said and not (tmp_path / "none").exists()


def test_streams_are_compared_with_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_train", train_here)
    save_store(make_dataset("events", users=20, items=10, events=300, features=2, seed=3), tmp_path / "events")
    words = ["train.epochs=1", "model.hidden=8", "temporal.batch=50", "temporal.static=false"]
    line = [f"--set={word}" for word in (*words, "temporal.eval_negatives=4")]
    line += ["--strategies", "temporal", "--model", "tgn", "-w", "1", "-q", "-o", tmp_path / "out"]
    (found,) = run_json("compare", tmp_path / "events", *line)["runs"]
    assert found["strategy"] == "temporal" and found["equals_local"] is False and found["difference"] is None


def test_a_run_in_a_process_of_its_own(store: Path, tmp_path: Path) -> None:
    contest = Comparison(store, tmp_path, ["local"], 1, {"model": {"hidden": 8, "layers": 2}, "train": {"epochs": 2}})
    assert compare.train_all(contest, say=print) == ["local"]
    assert len(read_metrics(tmp_path / "local" / "metrics.jsonl")) == 2


def test_its_error_is_raised_here(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'a remark' >&2\necho 'error: the loss is nan' >&2\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    said: list[str] = []
    with pytest.raises(RunError, match=r"^the loss is nan$"):
        compare.train_all(Comparison(store, tmp_path, ["local", "sar"], 2), say=said.append)
    assert said == ["local is left out: the loss is nan", "sar is left out: the loss is nan"]


def test_mistakes_of_compare(store: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert "different names" in fails("compare", store, "--strategies", "sar,sar", *out, code=2)
    assert "no strategy 'fast'" in fails("compare", store, "--strategies", "fast", *out, code=2)
    assert "sar.group" in fails("compare", store, "--set", "strategy.group=2", *out, code=2)
    assert "did you mean" in fails("compare", store, "--set", "train.epoch=2", *out, code=2)
    assert "no setting" in fails("compare", store, "--strategies", "sar", "--set", "sar.magic=2", "-q", *out, code=2)


def test_words_of_one_strategy() -> None:
    assert split_settings({"train.lr": 0.1, "sar.group": 2, "seed": 3}) == (
        {"train.lr": 0.1, "seed": 3},
        {"sar": {"group": 2}},
    )
    assert parse_strategies(" sar, tma") == ["sar", "tma"]
    with pytest.raises(ConfigError):
        parse_strategies(",")


def test_a_round_of_tma_is_a_pass(store: Path) -> None:
    graph = open_store(store)
    train = int((graph.single_nodes.split == 0).sum())
    contest = Comparison(store, store, ["tma"], 2, {}, {"tma": {"batch": 4}})
    assert one_epoch_steps(graph, contest.config("tma")) == {"steps": -(-train // 8)}
    for own in ({"steps": 7}, {"interval": 2.0}):
        assert one_epoch_steps(graph, Comparison(store, store, ["tma"], 2, {}, {"tma": own}).config("tma")) == {}
    drawn = Comparison(store, store, ["tma"], 2, {"split": "0.5/0.25/0.25"}, {"tma": {"batch": 4}})
    assert one_epoch_steps(graph, drawn.config("tma")) == {"steps": -(-(graph.num_nodes // 2) // 8)}
    assert (
        one_epoch_steps(graph, Comparison(store, store, ["tma"], 2, {}, {"tma": {"scheme": "ggs"}}).config("tma")) == {}
    )


def test_a_config_survives_the_command_line() -> None:
    """What a run is started with says the same as the config it came from."""
    for words in (
        {"strategy": {"name": "macrobatch", "fanouts": [5, 3]}, "workers": 2, "split": "0.6/0.2/0.2", "seed": 4},
        {"strategy": {"name": "macrobatch", "fanouts": {"a:to:b": [5, 3]}}, "model": {"name": "gat", "heads": 2}},
        {
            "task": "link",
            "memory": "1GiB",
            "train": {"optimizer": "sgd"},
            "strategy": {"name": "sar"},
            "precision": "float64",
        },
    ):
        config = resolve(words)
        typed = {
            key: json.dumps(value) for key, value in flatten(_non_default_settings(config)).items() if value is not None
        }
        assert resolve(unflatten({key: parse_value(text) for key, text in typed.items()})) == config


def test_a_verdict_in_words() -> None:
    assert [str(EqualityCheck(d)) for d in (1e-13, 0.3, None)] == ["yes (1e-13)", "no (3e-01)", "no, by design"]
    assert str(EqualityCheck(reason="no room")) == "not checked: no room"
    assert EqualityCheck(1e-13).as_json() == {"equals_local": True, "difference": 1e-13}
    assert EqualityCheck(reason="no room").as_json() == {
        "equals_local": None,
        "difference": None,
        "not_checked": "no room",
    }


def test_a_compared_run_ends_with_the_process_that_started_it() -> None:
    """The child sees to that itself, since code between fork and exec may deadlock while other threads run."""
    command = compare.gnnfleet_command("--version")
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("gnnfleet ")
    orphan = ["1" if word == str(os.getpid()) else word for word in command]
    assert subprocess.run(orphan, capture_output=True, check=False).returncode == 128 + signal.SIGKILL
