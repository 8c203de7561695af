"""``gnnfleet compare``: strategies with the same settings, checked against local, in one table and on one page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gnnfleet
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

OPTIONS = ("--set", "model.hidden=8", "--set", "model.layers=2", "--set", "train.epochs=3", "-q")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "store"
    save_store(communities(), path)
    return path


def train_in_process(store: Path, config: RunConfig, run_dir: Path, **_: Any) -> None:
    """Train in this process: a new one takes seconds to load torch."""
    run_training(open_store(store), config.model_dump(mode="json"), location=RunLocation(run_dir))


def test_exact_strategies_equal_local(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_train", train_in_process)
    out = tmp_path / "out"
    runs = run_json("compare", store, *OPTIONS, "-w", "1", "--strategies", "local,sar,macrobatch", "-o", out)["runs"]
    local, sar, sampled = runs
    assert [run["strategy"] for run in runs] == ["local", "sar", "macrobatch"]
    assert local["test"] == sar["test"] and local["difference"] is None
    assert sar["equals_local"] and sar["difference"] < 1e-9
    assert sampled["equals_local"] and sampled["loss"] != local["loss"], "compared with local on the same samples"
    page = (out / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["local", "sar", "macrobatch"]
    assert data["runs"][1]["equals"].startswith("yes")
    assert "not empty" in fails("compare", store, *OPTIONS, "-o", out, code=2)
    (out / "notes").touch()
    message = fails("compare", store, *OPTIONS, "--overwrite", "-o", out, code=2)
    assert "not empty" in message and "or --overwrite" not in message
    assert (out / "strategies" / "sar").is_dir(), "nothing is deleted if the directory holds other files"


def test_different_weights_do_not_equal_local(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are really compared: a reference that samples neighbours gives other weights."""
    monkeypatch.setattr(compare, "_train", train_in_process)
    monkeypatch.setattr(compare, "reference_config", lambda config, layers: LocalConfig(fanouts=(2,) * layers))
    comparison = Comparison(store, tmp_path, ["sar"], 1, {"model": {"hidden": 8, "layers": 2}})
    check = compare.check_all(comparison, ["sar"])["sar"]
    assert check.difference is not None and check.difference > 1e-6 and not check.equals


def test_a_check_that_fails_is_shown_with_its_reason(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of training are shown all the same."""

    def train(store: Path, config: RunConfig, run_dir: Path, **_: Any) -> None:
        if config.precision == "float64":
            raise ConfigError("a worker needs 1.4 GiB at least")
        train_in_process(store, config, run_dir)

    monkeypatch.setattr(compare, "_train", train)
    options = (*OPTIONS, "-w", "1", "--strategies", "local,sar", "-o", tmp_path / "out")
    local, sar = run_json("compare", store, *options)["runs"]
    assert (local["strategy"], sar["strategy"]) == ("local", "sar")
    assert sar["equals_local"] is None and sar["not_checked"].startswith("a worker needs")
    assert "not checked: a worker needs 1.4 GiB" in (tmp_path / "out" / "page.html").read_text()


def test_strategies_use_workers_and_partition_of_a_config_file(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies without parts ignore the partition; the strategy in the file is not compared."""
    monkeypatch.setattr(compare, "_train", train_in_process)
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text('workers = 1\n[strategy]\nname = "tma"\ninterval = 3.0\n')
    line = ["compare", store, *OPTIONS, "--config", file, "--strategies", "local,sar", "--no-check", "-o", out]
    runs = run_json(*line, "--set", "partition=random")["runs"]
    assert [run["workers"] for run in runs] == [1, 1] and "equals_local" not in runs[1]
    saved = [json.loads((out / "strategies" / name / "config.json").read_text()) for name in ("local", "sar")]
    assert [info["config"]["partition"] for info in saved] == [None, "random"]
    file.write_text('workers = "two"\n')
    message = fails("compare", store, "--config", file, "--strategies", "sar", "-o", tmp_path / "none", code=2)
    assert "workers='two'" in message and not (tmp_path / "none").exists()


def test_temporal_is_not_checked_against_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_train", train_in_process)
    save_store(make_dataset("events", users=20, items=10, events=300, features=2, seed=3), tmp_path / "events")
    settings = ["train.epochs=1", "model.hidden=8", "temporal.batch=50", "temporal.static=false"]
    line = [f"--set={setting}" for setting in (*settings, "temporal.eval_negatives=4")]
    line += ["--strategies", "temporal", "--model", "tgn", "-w", "1", "-q", "-o", tmp_path / "out"]
    (run,) = run_json("compare", tmp_path / "events", *line)["runs"]
    assert run["strategy"] == "temporal" and run["equals_local"] is False and run["difference"] is None


def test_a_compared_run_trains_in_its_own_process(store: Path, tmp_path: Path) -> None:
    settings = {"model": {"hidden": 8, "layers": 2}, "train": {"epochs": 2}}
    assert compare.train_all(Comparison(store, tmp_path, ["local"], 1, settings), say=print) == ["local"]
    assert len(read_metrics(tmp_path / "local" / "metrics.jsonl")) == 2


def test_errors_of_a_compared_run_are_reported(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'a remark' >&2\necho 'error: the loss is nan' >&2\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    notes: list[str] = []
    with pytest.raises(RunError, match=r"^the loss is nan$"):
        compare.train_all(Comparison(store, tmp_path, ["local", "sar"], 2), say=notes.append)
    assert notes == ["local is skipped: the loss is nan", "sar is skipped: the loss is nan"]


def test_mistakes_get_one_message(store: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert "different names" in fails("compare", store, "--strategies", "sar,sar", *out, code=2)
    assert "no strategy 'fast'" in fails("compare", store, "--strategies", "fast", *out, code=2)
    assert "sar.group" in fails("compare", store, "--set", "strategy.group=2", *out, code=2)
    assert "did you mean" in fails("compare", store, "--set", "train.epoch=2", *out, code=2)
    assert "no setting" in fails("compare", store, "--strategies", "sar", "--set", "sar.magic=2", "-q", *out, code=2)


def test_settings_of_one_strategy_have_its_name_as_prefix() -> None:
    assert split_settings({"train.lr": 0.1, "sar.group": 2, "seed": 3}) == (
        {"train.lr": 0.1, "seed": 3},
        {"sar": {"group": 2}},
    )
    assert parse_strategies(" sar, tma") == ["sar", "tma"]
    with pytest.raises(ConfigError):
        parse_strategies(",")


def test_a_round_of_tma_is_one_pass_unless_its_length_is_set(store: Path) -> None:
    graph = open_store(store)
    train = int((graph.single_nodes.split == 0).sum())

    def steps(options: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return one_epoch_steps(graph, Comparison(store, store, ["tma"], 2, settings, {"tma": options}).config("tma"))

    assert steps({"batch": 4}) == {"steps": -(-train // 8)}
    assert steps({"batch": 4}, split="0.5/0.25/0.25") == {"steps": -(-(graph.num_nodes // 2) // 8)}
    for options in ({"steps": 7}, {"interval": 2.0}, {"scheme": "ggs"}):
        assert steps(options) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": {"name": "macrobatch", "fanouts": [5, 3]}, "workers": 2, "split": "0.6/0.2/0.2", "seed": 4},
        {"strategy": {"name": "macrobatch", "fanouts": {"a:to:b": [5, 3]}}, "model": {"name": "gat", "heads": 2}},
        {"task": "link", "memory": "1GiB", "strategy": {"name": "sar"}, "train": {"optimizer": "sgd"}},
    ],
)
def test_a_config_is_the_same_after_the_command_line(settings: dict[str, Any]) -> None:
    config = resolve(settings)
    options = flatten(_non_default_settings(config)).items()
    parsed = {key: parse_value(json.dumps(value)) for key, value in options if value is not None}
    assert resolve(unflatten(parsed)) == config


def test_a_check_is_shown_as_text_and_json() -> None:
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
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("gnnfleet ")
    orphan = ["1" if argument == str(os.getpid()) else argument for argument in command]
    assert subprocess.run(orphan, capture_output=True, check=False).returncode == 128 + signal.SIGKILL


def test_no_code_runs_between_fork_and_exec() -> None:
    assert not [path for path in Path(gnnfleet.__file__).parent.rglob("*.py") if "preexec_fn" in path.read_text()]
