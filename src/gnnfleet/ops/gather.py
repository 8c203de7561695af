"""Gather rows of a table, with conversion to float32; of memory-mapped tables larger than memory, in file order."""

from __future__ import annotations

import mmap
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.csr import counting_sort
from gnnfleet.ops.native import _native, num_threads


def gather(
    table: Tensor,
    rows: Tensor,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    at: Tensor | None = None,
) -> Tensor:
    """``table[rows]`` ([n, F]); ``dtype`` may convert float16 and bfloat16 to float32. Rows are int32 or int64.

    ``out`` may be some columns of a wider tensor; with ``at`` [n] int64, distinct, only its rows ``at`` are
    written. Raises IndexError for a row out of range.
    """
    dtype = table.dtype if dtype is None else dtype
    if dtype != table.dtype and (dtype != torch.float32 or table.dtype not in (torch.float16, torch.bfloat16)):
        raise ConfigError(f"gather converts float16 and bfloat16 to float32 only, not {table.dtype} to {dtype}")
    table = table.contiguous()
    if out is None:
        out = empty_buffer((rows.shape[0], *table.shape[1:]), dtype)
    assert out.dtype == dtype and out.shape[1:] == table.shape[1:] and (at is not None or len(out) == len(rows))
    if not out.numel() or not len(rows):
        return out
    threads = num_threads(len(rows) * out.shape[1:].numel())
    if dtype == table.dtype:
        _native.gather_rows(as_bytes(table), rows.contiguous(), at, as_bytes(out), threads)
    else:
        bfloat = table.dtype == torch.bfloat16
        _native.gather_floats(table.view(torch.uint16), rows.contiguous(), at, out, bfloat, threads)
    return out


def as_bytes(table: Tensor) -> Tensor:
    """The same memory as [rows, bytes]."""
    return (table if table.dim() == 2 else table.view(table.shape[0], -1)).view(torch.uint8)


WINDOW_BYTES = 64 << 20  # bytes of a mapped table that may be in memory at a time


def read_rows(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` of a mapped table ([n, F]; rows [m] int64, ascending); all pages are prefetched first."""
    prefetch_pages(table, rows)
    return gather(table, rows)


def gather_by_window(
    table: Tensor, rows: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """``gather`` from a table that ``is_paged``, rows in any order: window by window, dropping each after reading.

    A page fault also loads neighbouring pages, so scattered rows would soon load the whole table.
    """
    if out is None:
        out = empty_buffer((rows.shape[0], *table.shape[1:]), table.dtype if dtype is None else dtype)
    high = max(1, WINDOW_BYTES // (table.shape[1:].numel() * table.element_size()))  # rows of a window
    offsets, order = counting_sort(rows // high, -(-table.shape[0] // high))
    sorted_rows = rows[order]
    for window, (first, end) in enumerate(pairwise(offsets.tolist())):
        if end > first:
            gather(table, sorted_rows[first:end], dtype, out=out, at=order[first:end])
            drop_pages(table[window * high : (window + 1) * high])
    return out


def prefetch_pages(table: Tensor, rows: Tensor) -> int:
    """Prefetch the pages of some rows ([m] int64, ascending) without waiting; returns the number of requests."""
    return int(_native.read_ahead(as_bytes(table), rows.contiguous())) if len(rows) and table.shape[1] else 0


def drop_pages(table: Tensor) -> None:
    """Drop the pages of a table that ``is_mapped`` and was never written to; access reads them again."""
    if table.numel():
        _native.let_go(as_bytes(table))


def spill_to_disk(table: Tensor, dtype: torch.dtype, beside: Path) -> Tensor:
    """A copy of a table in another dtype in an unnamed file, in directory ``beside`` if it is writable.

    The file is deleted with the tensor.
    """
    folder = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        step = max(1, _SPILL // max(1, table.shape[1] * dtype.itemsize))
        for low in range(0, table.shape[0], step):
            file.write(table[low : low + step].to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        if not file.tell():
            return table.to(dtype)
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapped, dtype=dtype).view(table.shape)


_SPILL = 32 << 20  # bytes converted at a time


def is_paged(table: Tensor) -> bool:
    """True if a table is mapped from a file and larger than a window."""
    return table.nbytes > WINDOW_BYTES and is_mapped(table)


def is_mapped(table: Tensor) -> bool:
    """True if all of a tensor is mapped from a file and unchanged; other pages must never be dropped."""
    first, last = table.data_ptr(), table.data_ptr() + table.nbytes
    try:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    except OSError:
        return False
    for line in lines:
        span, *fields = line.split()
        if span.endswith(":"):
            continue
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= first < high:
            changed = next(int(entry.split()[1]) for entry in lines if entry.startswith("Anonymous:"))
            return bool(table.numel()) and last <= high and int(fields[3]) != 0 and not changed
    return False
