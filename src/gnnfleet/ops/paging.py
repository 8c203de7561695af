"""Tables that are mapped from files and larger than memory: their pages asked for in order, and given back."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.ops.native import _native
from gnnfleet.ops.rows import gather


def read_rows(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` of a mapped table ([n, F]; rows [m] int64, ascending), read in the order in which they lie.

    Pages are asked for before the first is needed, so that the disk works ahead.
    """
    if len(rows) and table.shape[1]:
        _native.read_ahead(_raw(table), rows.contiguous())
    return gather(table, rows)


def read_ahead(table: Tensor, rows: Tensor) -> int:
    """Ask for the pages of some rows ([m] int64, ascending) and do not wait; how many requests that took."""
    return int(_native.read_ahead(_raw(table), rows.contiguous())) if len(rows) and table.shape[1] else 0


def let_go(table: Tensor) -> None:
    """Give back the pages of a table that ``is_mapped`` and was never written to; touching them reads them again."""
    if table.numel():
        _native.let_go(_raw(table))


def spill(table: Tensor, dtype: torch.dtype, near: Path) -> Tensor:
    """A copy of a table in another dtype that lies on disk, beside ``near`` where that can be written to.

    It has no name and is gone with the tensor.
    """
    place = near if os.access(near, os.W_OK) else None
    with tempfile.TemporaryFile(dir=place) as file:
        step = max(1, _SPILL // max(1, table.shape[1] * dtype.itemsize))
        for low in range(0, table.shape[0], step):
            file.write(table[low : low + step].to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
        file.flush()
        if not file.tell():
            return table.to(dtype)
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapped, dtype=dtype).view(table.shape)


_SPILL = 32 << 20  # bytes converted at a time


def is_mapped(table: Tensor) -> bool:
    """Whether a tensor lies in a file, all of it; what lies in memory alone must never be let go."""
    first, last = table.data_ptr(), table.data_ptr() + table.nbytes
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= first < high:
            return bool(table.numel()) and last <= high and int(inode) != 0
    return False


def _raw(table: Tensor) -> Tensor:
    return table.view(table.shape[0], -1).view(torch.uint8)
