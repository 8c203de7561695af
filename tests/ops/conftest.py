from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gnnfleet.ops.native import _native


@pytest.fixture(params=_native.isas().split())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine in turn."""
    before = _native.isa()
    assert _native.select_isa(request.param)
    yield request.param
    _native.select_isa(before)


@pytest.fixture
def set_threads() -> Iterator[object]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
