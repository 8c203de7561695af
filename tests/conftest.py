"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real graphs kept beside the checkout, or where GNNFLEET_DATA says; tests that need them are skipped elsewhere."""
    beside = Path(__file__).parents[1] / ".." / "shared" / "data"
    path = Path(os.environ.get("GNNFLEET_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"no real graphs at {path}")
    return path
