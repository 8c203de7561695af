"""Every config among the examples is one that can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnfleet.config.resolve import read_toml, resolve

CONFIGS = sorted((Path(__file__).parents[1] / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_resolves(path: Path) -> None:
    assert resolve(read_toml(path)).task == ("link" if path.parent.name == "link" else "node")
