"""Where large results are written: buffers that are kept and used again, because a fresh one costs more than its use.

A buffer goes back when the last tensor on it is gone. What is kept never exceeds a quarter of the most in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gnnfleet.ops.native import _native

# Below this the system's allocator keeps memory by itself.
_SMALL = 1 << 20
_pooled = True


def empty_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.empty``, on the CPU."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or not _pooled:
        return torch.empty(*shape, dtype=dtype)
    taken: Tensor = _native.pool_take(size)
    # In this order torch keeps no base tensor: gradients on the only reference to a storage are summed in place.
    return taken.view(*shape[:-1], shape[-1] * dtype.itemsize).view(dtype)


def release_buffers() -> None:
    """Give what is kept back to the system."""
    _native.pool_release()


@contextmanager
def unpooled() -> Iterator[None]:
    """Everything from torch's allocator, where its profiler sees it."""
    global _pooled
    before, _pooled = _pooled, False
    try:
        yield
    finally:
        _pooled = before
