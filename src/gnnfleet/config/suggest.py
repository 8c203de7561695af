"""Explanations of wrong settings, with the nearest known ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from gnnfleet.config.renamed import new_name, new_value
from gnnfleet.config.schema import RunConfig
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.registry import all_specs


def settings_ending_in(word: str) -> list[str]:
    """The settings, of any strategy, whose last part is ``word``."""
    found = [
        name for spec in all_specs().values() for name in _settings(spec.config) if name.rpartition(".")[2] == word
    ]
    return list(dict.fromkeys(found))


def explain(error: ValidationError, kind: type[StrategyConfig], prefix: str = "") -> str:
    first = error.errors()[0]
    words = _error_path(first)
    key = prefix + ".".join(words)
    if first["type"] == "extra_forbidden":
        return f"no setting {key!r}: {_suggestion(key, kind)}"
    if name := new_value(str(kind.model_fields["name"].default), key.removeprefix("strategy."), first["input"]):
        return f"{key}={first['input']} is called {key}={name} since version 0.2"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    said = dict.fromkeys(each["msg"].lower() for each in error.errors() if _error_path(each) == words)
    return f"{key}={_short(first['input'])}: {' or '.join(said).replace(' or input should be ', ' or ')}"


def _error_path(error: Mapping[str, Any]) -> list[str]:
    """The words that lead to a value; of one that may be of several kinds these are no part."""
    if error["type"] == "extra_forbidden":
        return [str(word) for word in error["loc"]]
    return [str(word) for word in error["loc"] if not re.search(r"[\[\-]", str(word)) and word not in _KINDS]


_KINDS = ("int", "float", "bool", "str")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _suggestion(key: str, kind: type[StrategyConfig]) -> str:
    """What to say of an unknown setting: the same word elsewhere comes before one that only looks like it."""
    group, _, word = key.rpartition(".")
    known = _settings(kind)
    if group == "strategy" and (name := new_name(str(kind.model_fields["name"].default), word)):
        return f"it is called strategy.{name} since version 0.2"
    same = [name for name in known if name.rpartition(".")[2] == word]
    if same:
        return f"did you mean {' or '.join(same)}?"
    others = [name for name, spec in all_specs().items() if word in spec.config.model_fields]
    if others and group in ("", "strategy"):
        mine = kind.model_fields["name"].default
        return f"strategy {mine} has none such, strategy.{word} is a setting of {', '.join(others)}"
    inside = [name for name in known if not group or name.startswith(f"{group}.")]
    near = {name.rpartition(".")[2]: name for name in reversed(inside)}
    close = difflib.get_close_matches(word, near, n=1, cutoff=0.5)
    here = [name.rpartition(".")[2] for name in inside if name.rpartition(".")[0] == group]
    return f"did you mean {near[close[0]]}?" if close else f"known: {', '.join(here)}"


def _settings(kind: type[StrategyConfig]) -> list[str]:
    """The full names of all settings of a run with a strategy, groups included."""
    found = list(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        group = kind if name == "strategy" else field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            found += [f"{name}.{word}" for word in group.model_fields]
    return found
