"""Fixtures every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Crew

# A torch store asks for the name behind every address that connects; a name server that loses questions would cost
# five seconds each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# One thread per process: tests run beside their own ranks, and OpenMP threads that wait for each other on busy cores
# take ten times as long. Tests of thread counts set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real graphs, where a directory with them lies beside the checkout or GNNFLEET_DATA names one."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("GNNFLEET_DATA", beside))
    if not (folder / "static").is_dir():
        pytest.skip("no real graphs: set GNNFLEET_DATA to a directory that has them")
    return folder


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Ranks for tests of many processes; none is started before it is needed."""
    made = Crew()
    yield made
    made.close()
