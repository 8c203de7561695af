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
from gnnfleet.nn.config import TEMPORAL_DEFAULTS, TEMPORAL_MODELS
from gnnfleet.strategies.registry import CONFIGS, find_config
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH
from gnnfleet.strategies.spec import StrategyConfig
from gnnfleet.strategies.temporal.config import EVENT_TRAIN_DEFAULTS, TemporalConfig

# What may differ between a run and its continuation without making it another run. Memory decides the chunks of an
# evaluation, which differ by rounding: a run that was killed for its memory must be able to go on with less. So do
# the parts of a graph: a run may go on with more or fewer machines.
_RESUMABLE = (
    "train.epochs",
    "train.patience",
    "train.checkpoint_seconds",
    "report.memory",
    "report.tensorboard",
    "report.trace",
    "memory",
    "workers",
    "partition",
    "strategy.batch_parallel",
    "strategy.epoch_parallel",
    "strategy.memory_parallel",
    "strategy.quorum",
    "strategy.deadline",
    "strategy.silence",
    "strategy.on_trainer_loss",
    "strategy.launcher",
    "strategy.listen",
    "strategy.local_trainers",
    "strategy.give_up",
)


def resolve(tree: Mapping[str, Any]) -> RunConfig:
    """Nested words as a RunConfig; raises ConfigError naming the first wrong word and what was expected."""
    tree = dict(tree)
    strategy = named_group("strategy", tree.pop("strategy", {}))
    if "model" in tree:
        tree["model"] = named_group("model", tree["model"])
    if strategy.get("name") == "tma" and strategy.get("scheme") == "ggs":
        _named(find_config("tma"), {**strategy, "scheme": "random"})  # words that are none are refused
        strategy = _expand_ggs(strategy, tree.get("workers", 1))
    kind = find_config(str(strategy.get("name", "local")))
    if kind is TemporalConfig:
        tree = _on_events(tree)
    if tree.get("task") == "link" and isinstance(tree.get("train", {}), Mapping):
        tree["train"] = {"weight_decay": 0.0, **tree.get("train", {})}  # it would shrink rarely used rows to nothing
    try:
        config = RunConfig(strategy=_named(kind, strategy), **tree)
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from None
    _check_fits(config)
    config.strategy.check_workers(config.workers)
    if config.strategy.name == "local" and config.workers != 1:
        several = "|".join(name for name in CONFIGS if name not in ("local", "temporal"))
        raise ConfigError(
            f"strategy local runs in one process, found workers={config.workers}: use --workers 1, "
            f"or --strategy {several}"
        )
    if config.partition is not None and not config.strategy.uses_parts:
        raise ConfigError(f"strategy {config.strategy.name} uses no parts: leave out --partition {config.partition}")
    return config


def _on_events(tree: SettingsTree) -> SettingsTree:
    """What words mean on a stream of events, where they are left out."""
    model = {"name": "tgn", **named_group("model", tree.get("model", {}))}
    train = tree.get("train", {})
    return {
        "task": "link",
        **tree,
        "model": {**TEMPORAL_DEFAULTS, **model},
        "train": {**EVENT_TRAIN_DEFAULTS, **train} if isinstance(train, Mapping) else train,
    }


def _check_fits(config: RunConfig) -> None:
    """Models and tasks of events go with the strategy for events, and only those."""
    name, model = config.strategy.name, config.model
    if isinstance(config.strategy, TemporalConfig):
        if not model.is_temporal:
            raise ConfigError(f"strategy temporal trains {', '.join(TEMPORAL_MODELS)}, found --model {model.label}")
        if model.layers > 2:
            raise ConfigError(f"{model.name} has one or two layers, found model.layers={model.layers}")
        if config.task == "node":
            raise ConfigError("strategy temporal predicts events: use --task link or edge, found node")
        return
    if model.is_temporal:
        raise ConfigError(f"model {model.name} is for streams of events: use --strategy temporal, found {name}")
    if config.task == "edge":
        raise ConfigError(f"task edge is for streams of events: use --strategy temporal, found {name}")


def _expand_ggs(words: SettingsTree, workers: Any) -> SettingsTree:
    """The baseline of tma that sees the whole graph: sampled batches as many times as large, each fetched by itself."""
    kept: SettingsTree = {key: words[key] for key in ("fanouts", "replace") if key in words}
    each, count = words.get("batch", DEFAULT_BATCH), workers if isinstance(workers, int) else 1
    batch = each * count if isinstance(each, int) else each
    return {"name": "macrobatch", **kept, "batch": batch, "batches_per_fetch": 1, "cache_inputs": False}


def named_group(key: str, value: Any) -> SettingsTree:
    """``model = "gcn"`` is short for a table with that name."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r}: expected a name or a table of settings")
    return dict(value)


def _named(kind: type[StrategyConfig], words: SettingsTree) -> StrategyConfig:
    try:
        return kind(**words)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, prefix="strategy.")) from None


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
    changed = [key for key in {**after, **before} if key not in _RESUMABLE and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the run was started with {key}={before.get(key)}, found {after.get(key)}: a run continues as it began; "
            "leave it out, or start another run"
        )
