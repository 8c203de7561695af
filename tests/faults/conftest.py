"""What tests of faults compare with: one store, and a run on two workers that nothing happened to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnnfleet.api import train
from gnnfleet.graph.store import save_store
from tests.graphs import communities

SAME: dict[str, Any] = {"strategy": "sar", "workers": 2, "model": {"name": "sage", "hidden": 8, "layers": 2}}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shop"
    save_store(communities(300), path)
    return path


@pytest.fixture(scope="session")
def whole_run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    train(store, **SAME, epochs=80, seed=3, run_dir=path, checkpoint_seconds=0.2)
    return path
