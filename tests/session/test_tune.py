"""``gnnfleet tune``: the configurations, the choice by validation, mistakes, and continuing a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gnnfleet as gf
from gnnfleet.cli.tune import parse_seconds
from gnnfleet.config.resolve import flatten, read_toml, resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.session.tune import configurations, tune
from gnnfleet.training.auto_defaults import with_auto_defaults

BASE: dict[str, Any] = {"split": "0.6/0.2/0.2", "train": {"epochs": 9}, "model": {"hidden": 8}}


@pytest.fixture(scope="module")
def graph() -> gf.Graph:
    return make_dataset("communities", nodes=300, edges=2000, classes=3, features=8)


def test_configurations_are_few_valid_and_respect_the_user(graph: gf.Graph) -> None:
    for own in ({}, {"model": "gat"}, {"model": {"name": "sage", "layers": 2}, "train": {"lr": 0.1}}):
        base = with_auto_defaults(graph, own, quiet=True)
        changes = configurations(graph, base, own)
        assert changes[0] == {} and 3 < len(changes) <= 30
        assert len({json.dumps(change, sort_keys=True) for change in changes}) == len(changes)
        for change in changes:
            resolve(base | {"model": base["model"] | {k[6:]: v for k, v in change.items() if k.startswith("model.")}})
            assert not set(change) & set(flatten(own))


def test_the_best_by_validation_wins_and_a_search_continues(graph: gf.Graph, tmp_path: Path) -> None:
    own = BASE | {"model": {"name": "sage", "hidden": 8, "dropout": 0.1, "norm": "layer"}}
    search = tune(graph, own, tmp_path / "s", budget=60)
    finished = [trial for trial in search.trials if trial.epochs == 9]
    assert len(finished) >= 1 and search.trials[0] in finished
    assert search.trials[0].val == max(trial.val for trial in finished if trial.val is not None)
    trained = gf.train(graph, config=read_toml(search.best), quiet=True)  # the file repeats the trial
    assert trained.metrics["val"] == pytest.approx(search.trials[0].val) and not trained.config.auto_defaults
    again = tune(graph, own, tmp_path / "s", budget=60)
    assert [t.changes for t in again.trials if t.epochs == 9] == [t.changes for t in finished]
    with pytest.raises(ConfigError, match="a search with other settings"):
        tune(graph, own | {"seed": 1}, tmp_path / "s", budget=60)


def test_mistakes_are_reported_before_anything_is_written(graph: gf.Graph, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        tune(graph, BASE, tmp_path / "full", budget=10)
    with pytest.raises(ConfigError, match="built-in models"):
        tune(graph, BASE | {"model": "net.py:make"}, tmp_path / "new", budget=10)
    assert not (tmp_path / "new").exists()
    for text, seconds in {"90s": 90, "1.5m": 90, "2h": 7200, "5": 5}.items():
        assert parse_seconds(text) == seconds
    with pytest.raises(ConfigError, match="expected a time such as 90s"):
        parse_seconds("soon")
