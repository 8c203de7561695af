"""A pool of buffers for large results: page faults of a new buffer cost more than filling it.

A buffer returns to the pool with its last tensor. Free buffers never exceed a quarter of the peak use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gnnfleet.ops.native import _native

# Below this the system's allocator reuses memory by itself.
_SMALL = 1 << 20
_pooled = True


def empty_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``torch.empty`` on the CPU, from the pool."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or not _pooled:
        return torch.empty(*shape, dtype=dtype)
    buffer: Tensor = _native.pool_take(size)
    # In this order torch keeps no base tensor: gradients on the only reference to a storage are summed in place.
    return buffer.view(*shape[:-1], shape[-1] * dtype.itemsize).view(dtype)


@contextmanager
def unpooled() -> Iterator[None]:
    """Allocate with torch inside the context, so that its profiler sees everything."""
    global _pooled
    before, _pooled = _pooled, False
    try:
        yield
    finally:
        _pooled = before
