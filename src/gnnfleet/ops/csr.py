"""Compressed sparse rows: sorting edges by destination, transposing, copying segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.native import _native, num_threads

# On a busy machine, waking a second thread takes longer than sorting this many keys.
_SINGLE_THREAD_EDGES = 1 << 18


@dataclass(frozen=True, eq=False)
class CSR:
    """Edges as compressed rows: row i has columns ``col[indptr[i]:indptr[i + 1]]``, 0 ≤ column < ``num_cols``."""

    indptr: Tensor  # [R + 1] int64
    col: Tensor  # [E] int32 or int64
    num_cols: int

    @property
    def num_rows(self) -> int:
        return int(self.indptr.shape[0]) - 1

    @property
    def num_edges(self) -> int:
        return int(self.col.shape[0])

    def check(self) -> None:
        """Raise ConfigError unless the arrays are valid, which kernels rely on. Costs one pass, once."""
        if self._fault:
            raise ConfigError(self._fault)

    @cached_property
    def _fault(self) -> str:
        indptr, col = self.indptr, self.col
        if indptr.dtype != torch.int64 or indptr.dim() != 1 or not indptr.numel():
            return f"indptr must be int64 of one dimension, found {indptr.dtype} {list(indptr.shape)}"
        if col.dtype not in (torch.int32, torch.int64) or col.dim() != 1:
            return f"columns must be int32 or int64 of one dimension, found {col.dtype} {list(col.shape)}"
        if int(indptr[0]) != 0 or int(indptr[-1]) != self.num_edges or bool((indptr.diff() < 0).any()):
            return f"indptr must rise from 0 to the number of edges, {self.num_edges}"
        if self.num_edges and not 0 <= int(col.min()) <= int(col.max()) < self.num_cols:
            return f"columns must be in 0..{self.num_cols - 1}"
        return ""

    @cached_property
    def row(self) -> Tensor:
        """[E] the row of every edge."""
        rows = torch.arange(self.num_rows, dtype=self.col.dtype, device=self.col.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    @cached_property
    def transposed(self) -> tuple[CSR, Tensor]:
        """(the same edges by column, [E] int64 the position here of each edge there)."""
        if self.num_edges <= _SINGLE_THREAD_EDGES or num_threads() == 1:
            indptr = torch.empty(self.num_cols + 1, dtype=torch.int64)
            row = torch.empty(self.num_edges, dtype=self.col.dtype)
            order = torch.empty(self.num_edges, dtype=torch.int64)
            _native.transpose(self.indptr.contiguous(), self.col.contiguous(), indptr, row, order)
            return CSR(indptr, row, self.num_rows), order
        indptr, order = counting_sort(self.col, self.num_cols)
        return CSR(indptr, self.row[order], self.num_rows), order

    @cached_property
    def with_self_loops(self) -> tuple[CSR, Tensor]:
        """(the same rows with exactly one self-loop each, last in it; [E'] int64 the position here, −1 for loops)."""
        workers = num_threads() if self.num_edges > _SINGLE_THREAD_EDGES else 1
        rows, columns = self.indptr.contiguous(), self.col.contiguous()
        indptr = torch.empty_like(rows)
        _native.count_looped(rows, columns, indptr, workers)
        total = int(indptr[-1])
        col, edge = torch.empty(total, dtype=self.col.dtype), torch.empty(total, dtype=torch.int64)
        _native.fill_looped(rows, columns, indptr, col, edge, workers)
        return CSR(indptr, col, self.num_cols), edge


def sort_edges(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """(indptr [num_dst + 1], order [E]): edge positions by destination, then source, then input position."""
    indptr, order, _ = sort_into_rows(src, dst, num_src=num_src, num_dst=num_dst)
    return indptr, order


def sort_into_rows(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, order, src[order]); see ``sort_edges``. Raises IndexError for an end out of range."""
    assert src.dtype == dst.dtype and src.shape == dst.shape
    if src.dtype != torch.int32 or src.shape[0] >= 2**32:
        by_src = counting_sort(src, num_src)[1]
        indptr, second = counting_sort(dst[by_src], num_dst)
        order = by_src[second]
        return indptr, order, src[order]
    indptr = torch.empty(num_dst + 1, dtype=torch.int64)
    order = torch.empty(src.shape[0], dtype=torch.int64)
    sorted_src = torch.empty_like(src, memory_format=torch.contiguous_format)
    _native.sort_edges(src.contiguous(), dst.contiguous(), num_src, indptr, order, sorted_src, num_threads())
    return indptr, order, sorted_src


def sort_sources(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """(indptr, sources in store order) of int32 edges that carry no data: half the memory of ``sort_into_rows``."""
    indptr = torch.empty(num_dst + 1, dtype=torch.int64)
    sorted_src = torch.empty_like(src, memory_format=torch.contiguous_format)
    _native.sort_rows(src.contiguous(), dst.contiguous(), num_src, indptr, sorted_src, num_threads())
    return indptr, sorted_src


def distinct_edges(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, sources, counts): distinct int32 edges in store order, and the multiplicity of each ([E] int32)."""
    indptr, sources = sort_sources(src, dst, num_src=num_src, num_dst=num_dst)
    distinct = torch.empty_like(indptr)
    _native.count_distinct(indptr, sources, distinct, num_threads())
    out = torch.empty(int(distinct[-1]), dtype=torch.int32)
    times = torch.empty_like(out)
    _native.take_distinct(indptr, sources, distinct, out, times, num_threads())
    return distinct, out, times


def offsets_of(counts: Tensor) -> Tensor:
    """[n + 1] int64: 0 and the cumulative sums of [n] counts, or of a mask."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def inverse_permutation(order: Tensor) -> Tensor:
    """[n] int64: the position of each number in a permutation of 0 … n − 1."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def counting_sort(keys: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """(offsets [buckets + 1] int64, order [n] int64): positions by key, ties in input order."""
    offsets = torch.empty(buckets + 1, dtype=torch.int64)
    order = torch.empty(keys.shape[0], dtype=torch.int64)
    workers = num_threads() if keys.shape[0] > _SINGLE_THREAD_EDGES else 1
    _native.counting_sort(keys.contiguous(), offsets, order, workers)
    return offsets, order


def put_segments(values: Tensor, offsets: Tensor, rows: Tensor, *, into: Tensor, out: Tensor) -> None:
    """Copy segment i of values ([E, …], split at ``offsets``) to segment ``rows[i]`` of out (split at ``into``).

    Raises ValueError if lengths differ.
    """
    if not values.numel():
        return
    source, target = (t.contiguous().view(t.shape[0], -1).view(torch.uint8) for t in (values, out))
    assert target.data_ptr() == out.data_ptr() and values.dtype == out.dtype
    _native.put_segments(source, offsets, rows, into, target, num_threads(len(values)))
