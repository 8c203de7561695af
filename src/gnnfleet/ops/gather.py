"""Gather rows of a table, with conversion to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.ops.buffers import empty_buffer
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
