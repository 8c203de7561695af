"""Compressed rows: sorting edges by destination, turning rows into columns, cutting rows out."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.native import _native, threads


def sort_edges(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """(indptr [num_dst + 1], order [E]): edge positions by destination, then source, then input position."""
    assert src.dtype == dst.dtype and src.shape == dst.shape
    by_src = counting_sort(src, num_src)[1]
    indptr, second = counting_sort(dst[by_src], num_dst)
    return indptr, by_src[second]


def counting_sort(keys: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """(offsets [buckets + 1] int64, order [n] int64): positions by key, ties in input order."""
    offsets = torch.empty(buckets + 1, dtype=torch.int64)
    order = torch.empty(keys.shape[0], dtype=torch.int64)
    # Waking a second thread on a busy machine takes longer than sorting this many keys with one.
    workers = threads() if keys.shape[0] > 1 << 18 else 1
    _native.counting_sort(keys.contiguous(), offsets, order, workers)
    return offsets, order
