"""Settings of a run: TOML file, ``--set a.b=c`` and keyword arguments, resolved into one frozen RunConfig.

An unknown setting is refused with the nearest known one. The resolved config is saved with the run, so the run
directory alone is enough to repeat it.
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
    "evaluation_memory",
    "workers",
    "silence_limit",
    "partition",
    "check",
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
        raise ConfigError(explain(error, spec, prefix="strategy.")) from None
    tree = overlay(spec.defaults, tree)
    if tree.get("task") == "link" and isinstance(tree.get("train", {}), Mapping):
        tree["train"] = {"weight_decay": 0.0, **tree.get("train", {})}  # it would shrink rarely used rows to nothing
    try:
        config = RunConfig(strategy=strategy, **tree)
    except ValidationError as error:
        raise ConfigError(explain(error, spec)) from None
    _check_input(config)
    strategy.check_workers(config.workers)
    if spec.execution == "single" and config.workers != 1:
        others = [name for name, other in all_specs().items() if other.execution != "single" and other.input == "graph"]
        raise ConfigError(
            f"strategy {spec.name} runs in one process, found workers={config.workers}: use --workers 1, "
            f"or --strategy {'|'.join(others)}"
        )
    if config.partition is not None and spec.placement == "none":
        raise ConfigError(f"strategy {spec.name} uses no partition: leave out --partition {config.partition}")
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
        raise ConfigError(f"{subject} is for event streams: use --strategy {others}, found {name}")


def named_group(key: str, value: Any) -> SettingsTree:
    """Expand ``model = "gcn"``, which is short for a table with that name."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        module = ", or in Python an instance of a torch.nn.Module" if key == "model" else ""
        raise ConfigError(f"{key}={value!r}: expected a name or a table of settings{module}")
    return dict(value)


def read_toml(path: Path) -> SettingsTree:
    """Read a config file; raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, numbers of thousands of digits, nested too deep
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_value(text: str) -> Any:
    """Parse ``256``, ``0.01``, ``true``, ``[10, 5]`` as TOML does; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def unflatten(settings: Mapping[str, Any]) -> SettingsTree:
    """Turn ``{"train.lr": 0.1}`` into ``{"train": {"lr": 0.1}}``; raises ConfigError if a group has a value."""
    tree: SettingsTree = {}
    for key, value in settings.items():
        *groups, last = key.split(".")
        subtree = tree
        for group in groups:
            subtree = subtree.setdefault(group, {})
            if not isinstance(subtree, dict):
                raise ConfigError(f"{key} cannot be set: {group} has a value already")
        subtree[last] = value
    return tree


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> SettingsTree:
    """Merge nested settings; ``over`` wins. If it names another strategy, the settings of the former one are dropped.

    Settings of a strategy that ``base`` does not name are kept.
    """
    tree = dict(base)
    for key, value in over.items():
        replaced = tree.get(key)
        if key in ("strategy", "model") and replaced is not None:
            value, replaced = named_group(key, value), named_group(key, replaced)
            name = replaced.get("name")
            if key == "strategy" and name is not None and value.get("name", name) != name:
                replaced = None
        nested = isinstance(replaced, Mapping) and isinstance(value, Mapping)
        tree[key] = overlay(replaced, value) if nested and replaced is not None else value
    return tree


def merge_settings(file: Mapping[str, Any], flat: Mapping[str, Any], options: Mapping[str, Any]) -> SettingsTree:
    """Merge the settings of a file, of ``--set`` (``flat``) and of options; later ones win.

    If the options name another strategy than the file, strategy settings of the file are dropped. Those of ``--set``
    stay: they are meant for the strategy that the options name.
    """
    strategy = named_group("strategy", options.get("strategy") or {})
    if "name" not in strategy:
        return overlay(overlay(file, unflatten(flat)), options)
    name = {"name": strategy["name"]}
    merged = overlay(overlay(file, {"strategy": name}), unflatten(flat))
    if isinstance(merged["strategy"], Mapping):
        merged["strategy"] = {**merged["strategy"], **name}
    return overlay(merged, options)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> SettingsTree:
    """Reverse ``unflatten``."""
    flat: SettingsTree = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_resumable(old: RunConfig, new: RunConfig) -> None:
    """Raise ConfigError if ``new`` would make a resumed run differ from an uninterrupted one."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    resumable = {*_RESUMABLE, *(f"strategy.{option}" for option in old.spec.resumable)}
    if old.train.depends_on_epochs:
        resumable -= {"train.epochs"}
    changed = [key for key in {**after, **before} if key not in resumable and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the run was started with {key}={before.get(key)}, found {after.get(key)}: a resumed run keeps its "
            "settings; leave it out, or start another run"
        )
