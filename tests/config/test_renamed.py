"""Options of version 0.1.0 are refused with the name that replaced them, or the reason of their removal."""

from __future__ import annotations

import pytest

from gnnfleet.config.renamed import REMOVED, REMOVED_VALUES, RENAMED, RENAMED_VALUES
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.strategies.registry import find_spec


@pytest.mark.parametrize(
    ("strategy", "old", "new"), [(name, *pair) for name, pairs in RENAMED.items() for pair in pairs.items()]
)
def test_an_old_name_is_refused_with_the_new_one(strategy: str, old: str, new: str) -> None:
    assert old not in find_spec(strategy).config.model_fields
    assert new in find_spec(strategy).config.model_fields
    with pytest.raises(ConfigError, match=rf"'strategy\.{old}': it is called strategy\.{new} since"):
        resolve({"strategy": {"name": strategy, old: 1}, "workers": 2})


@pytest.mark.parametrize(
    ("strategy", "option", "old", "new"),
    [(*key, *pair) for key, pairs in RENAMED_VALUES.items() for pair in pairs.items()],
)
def test_an_old_value_is_refused_with_the_new_one(strategy: str, option: str, old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.{option}={old} is called strategy.{option}={new} since"):
        resolve({"strategy": {"name": strategy, option: old}, "workers": 2})


@pytest.mark.parametrize(("strategy", "option"), REMOVED)
def test_a_removed_option_is_refused_with_the_reason(strategy: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"'strategy\.{option}': it was removed in version 0.2: \w+"):
        resolve({"strategy": {"name": strategy, option: 1}, "workers": 2})


@pytest.mark.parametrize(("strategy", "option", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_with_the_reason(strategy: str, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy\.{option}={value} was removed in version 0.2: \w+"):
        resolve({"strategy": {"name": strategy, option: value}, "workers": 2})
