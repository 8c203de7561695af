"""Explanations of wrong settings, with the nearest known ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from gnnfleet.config.renamed import REMOVED, REMOVED_VALUES, RENAMED, RENAMED_VALUES
from gnnfleet.config.schema import RunConfig
from gnnfleet.strategies.registry import all_specs
from gnnfleet.strategies.spec import StrategySpec

_UNION_MEMBERS = ("int", "float", "bool", "str")
"""Parts of pydantic's error paths that name a type of a union and no setting."""

UNSUPPORTED = {"device": "gnnfleet runs on CPUs only, leave it out"}


@cache
def settings_of_all_strategies() -> list[str]:
    """Full names of the settings of any strategy."""
    return list(dict.fromkeys(name for spec in all_specs().values() for name in _setting_names(spec)))


def settings_ending_in(option: str) -> list[str]:
    """Full names of the settings, of any strategy, whose last part is ``option``."""
    return [name for name in settings_of_all_strategies() if name.rpartition(".")[2] == option]


def explain(error: ValidationError, spec: StrategySpec[Any], prefix: str = "") -> str:
    """Describe the first error of a config with this strategy."""
    first = error.errors()[0]
    path = _error_path(first)
    key = prefix + ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"no setting {key!r}: {suggest_setting(key, spec)}"
    option, old = (spec.name, key.removeprefix("strategy.")), str(first["input"])
    if value := RENAMED_VALUES.get(option, {}).get(old):
        return f"{key}={old} is called {key}={value} since version 0.2"
    if reason := REMOVED_VALUES.get((*option, old)):
        return f"{key}={old} was removed in version 0.2: {reason}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    messages = dict.fromkeys(other["msg"].lower() for other in error.errors() if _error_path(other) == path)
    return f"{key}={_shortened(first['input'])}: {' or '.join(messages).replace(' or input should be ', ' or ')}"


def _error_path(error: Mapping[str, Any]) -> list[str]:
    """Path of a setting, without the parts that name a member of a union."""
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return path
    return [part for part in path if not re.search(r"[\[\-]", part) and part not in _UNION_MEMBERS]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def suggest_setting(key: str, spec: StrategySpec[Any]) -> str:
    """Suggest a setting in place of an unknown one: the same name in another group, else the most similar name."""
    group, _, option = key.rpartition(".")
    if option in UNSUPPORTED:
        return UNSUPPORTED[option]
    if group == "strategy" and (name := RENAMED.get(spec.name, {}).get(option)):
        return f"it is called strategy.{name} since version 0.2"
    if group == "strategy" and (reason := REMOVED.get((spec.name, option))):
        return f"it was removed in version 0.2: {reason}"
    names = _setting_names(spec)
    same = [name for name in names if name.rpartition(".")[2] == option]
    if same:
        return f"did you mean {' or '.join(same)}?"
    others = [name for name, other in all_specs().items() if option in other.config.model_fields]
    if others and group in ("", "strategy"):
        return f"strategy {spec.name} has no such setting, strategy.{option} is a setting of {', '.join(others)}"
    in_group = [name for name in names if not group or name.startswith(f"{group}.")]
    by_option = {name.rpartition(".")[2]: name for name in reversed(in_group)}
    closest = difflib.get_close_matches(option, by_option, n=1, cutoff=0.65)
    if closest:
        return f"did you mean {by_option[closest[0]]}?"
    return "known: " + ", ".join(name.rpartition(".")[2] for name in in_group if name.rpartition(".")[0] == group)


def _setting_names(spec: StrategySpec[Any]) -> list[str]:
    """Full names of all settings of a run with a strategy, groups included."""
    names = list(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        group = spec.config if name == "strategy" else field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            names += [f"{name}.{option}" for option in group.model_fields]
    return names
