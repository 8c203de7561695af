"""The kernels in plain torch: the oracle in tests, and the path on devices the compiled kernels do not serve."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_edges(src: Tensor, dst: Tensor, *, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """See ``csr.sort_edges``."""
    del num_src
    by_src = torch.argsort(src, stable=True)
    order = by_src[torch.argsort(dst[by_src], stable=True)]
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst.long(), minlength=num_dst).cumsum(0)
    return indptr, order


def gather(table: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """See ``rows.gather``."""
    return table[rows.long()].to(table.dtype if dtype is None else dtype)
