"""Fixtures for tests of faults: a store, an uninterrupted run on two workers, commands and forked ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnfleet.api import train
from gnnfleet.graph.store import save_store
from tests.faults.driving import Driver
from tests.faults.trials import ForkServer
from tests.graphs import communities

UNINTERRUPTED: dict[str, Any] = {
    "strategy": "sar",
    "workers": 2,
    "model": {"name": "sage", "hidden": 8, "layers": 2},
    "auto_defaults": False,
}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shop"
    save_store(communities(300), path)
    return path


@pytest.fixture(scope="session")
def uninterrupted_run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(store, **UNINTERRUPTED, epochs=80, seed=3, run_dir=path, checkpoint_seconds=0.2)
    return path


@pytest.fixture
def drive(store: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts training commands by name of their run directory; none outlives the test."""
    drivers: list[Driver] = []

    def start_driver(name: str, *arguments: str | Path, strategy: str = "sar") -> Driver:
        drivers.append(Driver(store, tmp_path / name, *arguments, strategy=strategy))
        return drivers[-1]

    yield start_driver
    for driver in drivers:
        driver.process.kill()
        driver.process.communicate()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()
