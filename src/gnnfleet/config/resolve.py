"""The words of a run: TOML file, ``--set a.b=c`` and keyword arguments, resolved into one frozen value.

Unknown words are refused with the nearest known one. The resolved config is saved with the run, so a run can be
repeated from its directory alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.config.suggest import explain
from gnnfleet.errors import ConfigError
from gnnfleet.nn.config import TEMPORAL_MODELS
from gnnfleet.strategies.registry import all_specs, find_spec

# Settings that a resumed run may change, besides those of its strategy's spec. Memory decides the chunks of an
# evaluation, which changes rounding only: a run that was killed for its memory must be able to resume with less. So do
# partitions: a run may resume with more or fewer machines.
_RESUMABLE = (
    "train.epochs",
    "train.patience",
    "train.checkpoint_seconds",
    "report.memory",
    "report.tensorboard",
    "report.trace",
    "memory",
    "workers",
    "silence_limit",
    "partition",
)


def resolve(tree: Mapping[str, Any]) -> RunConfig:
    """Resolve nested settings; raises ConfigError naming the first wrong setting and what was expected."""
    tree = dict(tree)
    settings = named_group("strategy", tree.pop("strategy", {}))
    if "model" in tree:
        tree["model"] = named_group("model", tree["model"])
    spec = find_spec(str(settings.get("name", "local")))
    try:
        settings = spec.expand(settings, tree.get("workers", 1))
        spec = find_spec(str(settings.get("name", "local")))
        strategy = spec.config(**settings)
    except ValidationError as error:
        raise ConfigError(explain(error, spec.config, prefix="strategy.")) from None
    tree = overlay(spec.defaults, tree)
    if tree.get("task") == "link" and isinstance(tree.get("train", {}), Mapping):
        tree["train"] = {"weight_decay": 0.0, **tree.get("train", {})}  # it would shrink rarely used rows to nothing
    try:
        config = RunConfig(strategy=strategy, **tree)
    except ValidationError as error:
        raise ConfigError(explain(error, spec.config)) from None
    _check_input(config)
    strategy.check_workers(config.workers)
    if spec.execution == "single" and config.workers != 1:
        others = [name for name, other in all_specs().items() if other.execution != "single" and other.input == "graph"]
        raise ConfigError(
            f"strategy {spec.name} runs in one process, found workers={config.workers}: use --workers 1, "
            f"or --strategy {'|'.join(others)}"
        )
    if config.partition is not None and spec.placement == "none":
        raise ConfigError(f"strategy {spec.name} uses no parts: leave out --partition {config.partition}")
    return config


def _check_input(config: RunConfig) -> None:
    """Raise ConfigError for a model or task of event streams with a strategy on graphs, and the reverse."""
    name, model = config.strategy.name, config.model
    if config.spec.input == "events":
        if not model.is_temporal:
            raise ConfigError(f"strategy {name} trains {', '.join(TEMPORAL_MODELS)}, found --model {model.label}")
        if model.layers > 2:
            raise ConfigError(f"{model.name} has one or two layers, found model.layers={model.layers}")
        if config.task == "node":
            raise ConfigError(f"strategy {name} predicts events: use --task link or edge, found node")
        return
    subject = f"model {model.name}" if model.is_temporal else "task edge" if config.task == "edge" else ""
    if subject:
        others = "|".join(other for other, spec in all_specs().items() if spec.input == "events")
        raise ConfigError(f"{subject} is for streams of events: use --strategy {others}, found {name}")


def named_group(key: str, value: Any) -> SettingsTree:
    """``model = "gcn"`` is short for a table with that name."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r}: expected a name or a table of settings")
    return dict(value)


def read_toml(path: Path) -> SettingsTree:
    """The words of a config file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, numbers of thousands of digits, nested too deep
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_value(text: str) -> Any:
    """``256``, ``0.01``, ``true``, ``[10, 5]`` as TOML reads them; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def unflatten(settings: Mapping[str, Any]) -> SettingsTree:
    """``{"train.lr": 0.1}`` as ``{"train": {"lr": 0.1}}``; raises ConfigError for a word that is also a group."""
    tree: SettingsTree = {}
    for key, value in settings.items():
        *groups, last = key.split(".")
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key} cannot be set: {group} has a value already")
        at[last] = value
    return tree


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> SettingsTree:
    """``base`` with what ``over`` says in its place. Another strategy keeps nothing of the former's words; words
    that belong to none yet are kept."""
    tree = dict(base)
    for key, value in over.items():
        below = tree.get(key)
        if key in ("strategy", "model") and below is not None:
            value, below = named_group(key, value), named_group(key, below)
            former = below.get("name")
            if key == "strategy" and former is not None and value.get("name", former) != former:
                below = None
        tree[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return tree


def merge_settings(file: Mapping[str, Any], given: Mapping[str, Any], options: Mapping[str, Any]) -> SettingsTree:
    """The words of a file, of ``--set`` and of options, later ones winning. Where options name another strategy than
    the file, its words go, those of ``--set`` stay: they are meant for the one that is named."""
    strategy = named_group("strategy", options.get("strategy") or {})
    first = overlay(file, {"strategy": {"name": strategy["name"]}}) if "name" in strategy else file
    words = overlay(first, unflatten(given))
    said = words.get("strategy")
    if "name" in strategy and isinstance(said, Mapping):
        words["strategy"] = {**said, "name": strategy["name"]}
    return overlay(words, options)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> SettingsTree:
    """The reverse of ``unflatten``."""
    flat: SettingsTree = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_resumable(old: RunConfig, new: RunConfig) -> None:
    """Raise ConfigError when ``new`` would make a continued run differ from an uninterrupted one."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    resumable = {*_RESUMABLE, *(f"strategy.{option}" for option in old.spec.resumable)}
    changed = [key for key in {**after, **before} if key not in resumable and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the run was started with {key}={before.get(key)}, found {after.get(key)}: a run continues as it began; "
            "leave it out, or start another run"
        )
