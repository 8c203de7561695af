"""Settings become one frozen config; a wrong name is refused with the nearest right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gnnfleet.config.resolve import (
    check_resumable,
    flatten,
    merge_settings,
    overlay,
    parse_value,
    read_toml,
    resolve,
    unflatten,
)
from gnnfleet.errors import ConfigError


def test_saved_defaults_are_read_back() -> None:
    config = resolve({})
    assert config.strategy.name == "local" and config.train.epochs == 100 and config.model.name == "sage"
    assert resolve(config.model_dump(mode="json")) == config
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [("256", 256), ("0.01", 0.01), ("1e-3", 1e-3), ("true", True), ("[10, 5]", [10, 5]), ("gcn", "gcn"),
     ("0.6/0.2/0.2", "0.6/0.2/0.2"), ("20-per-class", "20-per-class"), (".5", ".5"), ("", "")],
)  # fmt: skip
def test_values_are_read_as_toml(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_settings_are_converted_to_their_types() -> None:
    settings = {key: parse_value(value) for key, value in {"train.lr": ".5", "train.epochs": "7", "split": "3"}.items()}
    config = resolve(unflatten(settings))
    assert config.train.lr == 0.5 and config.train.epochs == 7 and config.split == 3


def test_strategy_settings_may_come_before_the_strategy_name() -> None:
    """``--strategy sar --set strategy.group=2``, in any order."""
    assert overlay({"strategy": {"group": 2}}, {"strategy": {"name": "sar"}})["strategy"] == {"group": 2, "name": "sar"}
    assert overlay({"strategy": {"name": "sar"}}, {"strategy": {"group": 2}})["strategy"] == {"group": 2, "name": "sar"}


def test_later_settings_win_and_another_strategy_drops_the_settings_of_the_first() -> None:
    base = {"train": {"lr": 0.1, "epochs": 5}, "strategy": {"name": "other", "knob": 1}}
    tree = overlay(base, {"train": {"lr": 0.2}, "strategy": "local"})
    assert tree == {"train": {"lr": 0.2, "epochs": 5}, "strategy": {"name": "local"}}
    assert flatten(tree)["train.epochs"] == 5


def test_set_applies_to_the_strategy_of_the_options() -> None:
    """``--config FILE --strategy tma --set strategy.interval=5`` with another strategy in the file."""
    sar = {"name": "sar", "group": 2}
    file = {"seed": 1, "strategy": sar}
    merged = merge_settings(file, {"strategy.interval": 5, "seed": 2}, {"strategy": {"name": "tma"}, "seed": 3})
    assert merged == {"seed": 3, "strategy": {"name": "tma", "interval": 5}}
    for settings, options, strategy in (
        ({"strategy.group": 1}, {"strategy": {"name": "sar"}}, {"name": "sar", "group": 1}),
        ({"strategy.prefetch": 0}, {"strategy": {"launcher": "ray"}}, {**sar, "prefetch": 0, "launcher": "ray"}),
        ({"strategy.name": "tma"}, {}, {"name": "tma"}),
        ({"strategy": "tma"}, {"strategy": {"name": "local"}}, {"name": "local"}),
        ({}, {}, sar),
    ):
        assert merge_settings(file, settings, options)["strategy"] == strategy
    assert (
        merge_settings({"strategy": "sar"}, {"strategy.group": 2}, {"strategy": {"name": "sar"}})["strategy"]["group"]
        == 2
    )
    assert merge_settings({}, {}, {}) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trian": {}}, "no setting 'trian': did you mean train?"),
        ({"train": {"epoch": 3}}, "no setting 'train.epoch': did you mean train.epochs?"),
        ({"model": {"hiden": 3}}, "no setting 'model.hiden': did you mean model.hidden?"),
        ({"strategy": {"name": "local", "ordr": "store"}}, "no setting 'strategy.ordr': did you mean strategy.order?"),
        ({"train": {"zzz": 3}}, "known: epochs, lr"),
        ({"train": {"lr": -1}}, "train.lr=-1: input should be greater than 0"),
        ({"train": {"epochs": "many"}}, "train.epochs='many': input should be a valid integer"),
        ({"train": {"optimizer": "lion"}}, "'adam', 'adamw' or 'sgd'"),
        ({"model": {"name": "sagee"}}, "did you mean 'sage'?"),
        ({"strategy": "fast"}, "no strategy 'fast'; this version has local"),
        ({"task": "edge"}, "task edge is for event streams"),
        ({"task": "link", "link": {"exclude": "disjoint:2"}}, "a share P between 0 and 1"),
        ({"workers": 4}, "local runs in one process, found workers=4"),
        ({"precision": "half"}, "precision='half'"),
        ({"seed": -1}, "seed=-1"),
        ({"train": 3}, "train=3"),
        ({"train": {"label_smoothing": 1.0}}, "train.label_smoothing=1.0: input should be less than 1"),
        ({"memory": "4 gigs"}, "memory '4 gigs' is not a size: write 4GiB, 500MB or a number of bytes"),
        ({"memory": 0}, "memory 0 is not a size"),
        ({"memory": True}, "memory True is not a size"),
        ({"memory": [4]}, "memory [4] is not a size"),
        ({"partition": "minkut"}, "no partitioner 'minkut': did you mean 'mincut'?"),
        ({"partition": "zzz"}, "choose one of random, range, mincut, super, stream"),
        ({"partition": "mincut"}, "strategy local uses no partition: leave out --partition mincut"),
        ({"model": {"name": "mine.py"}}, "a custom model is named file.py:factory, found 'mine.py'"),
        ({"model": {"name": "mine.py:"}}, "a custom model is named file.py:factory"),
        ({"model": {"name": "gcn", "settings": {"a": 1}}}, "model.settings is only for custom models"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_is_short_for_a_table() -> None:
    assert resolve({"model": "gcn"}).model.name == "gcn"
    assert overlay({"model": {"name": "gcn", "hidden": 8}}, {"model": "gat"})["model"] == {"name": "gat", "hidden": 8}
    assert overlay({"model": "gcn"}, {"model": {"hidden": 8}})["model"] == {"name": "gcn", "hidden": 8}


def test_a_setting_cannot_be_a_group() -> None:
    with pytest.raises(ConfigError, match="has a value already"):
        unflatten({"train": 1, "train.lr": 2})


def test_toml_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n[strategy]\nname = "local"\norder = "store"\n[train]\nlr = 0.5\n')
    assert resolve(read_toml(path)).train.lr == 0.5
    path.write_text("seed = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot read config"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("4gib", 4 << 30), ("1.5 MiB", 3 << 19), ("2KB", 2000), ("3 MB", 3 * 10**6), ("1GB", 10**9),
     ("1KiB", 1024), ("1TiB", 1 << 40), ("77", 77), (77, 77), ("9B", 9), (" 8 GiB ", 8 << 30)],
)  # fmt: skip
def test_memory_is_read_with_its_unit(text: str | int, count: int) -> None:
    config = resolve({"memory": text})
    assert config.memory == count and resolve(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("text", ["", "GiB", "-1", "-1GiB", "4XB", "4G", "1e9", "nan", "inf", "0.1B", "0GiB", "4GiB2"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size: write 4GiB"):
        resolve({"memory": text})


def test_a_run_is_resumed_with_its_settings() -> None:
    old = resolve({})
    check_resumable(old, resolve({"train": {"epochs": 500, "patience": 3}, "memory": "1GiB"}))
    custom = {"name": "mine.py:make", "settings": {"a": 1}}
    with pytest.raises(ConfigError, match=r"started with model.settings.a=1, found None"):
        check_resumable(resolve({"model": custom}), resolve({"model": {**custom, "settings": {}}}))
    with pytest.raises(ConfigError, match=r"started with train.lr=0.01, found 0.5"):
        check_resumable(old, resolve({"train": {"lr": 0.5}}))
