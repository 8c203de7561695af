"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool

# A torch store looks up the name of every address that connects; a lossy name server would add five seconds to each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# One thread per process: OpenMP threads on cores that are busy with ranks make tests ten times slower. Tests of
# thread counts set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of real graphs: GNNFLEET_DATA, or shared/data beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("GNNFLEET_DATA", beside))
    if not (folder / "static").is_dir():
        pytest.skip("no real graphs: set GNNFLEET_DATA to a directory that has them")
    return folder


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes; none is started before a test needs it."""
    ranks = RankPool()
    yield ranks
    ranks.close()
