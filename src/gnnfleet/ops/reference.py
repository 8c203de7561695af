"""The kernels in plain torch: the oracle in tests, and the path on devices the compiled kernels do not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.csr import Compressed


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


def aggregate(structure: Compressed, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None) -> Tensor:
    """See ``aggregate.aggregate``; any device, gradients by autograd."""
    rows, cols = structure.row.long(), structure.col.long()
    messages = (x.float() if x.dtype == torch.bfloat16 else x)[cols]
    if weight is not None:
        messages = messages * weight.to(messages.dtype).view(-1, *([1] * (x.dim() - 1)))
    out = messages.new_zeros(structure.num_rows, *x.shape[1:])
    if reduce != "max":
        out = out.index_add(0, rows, messages)
        degree = structure.indptr.diff().clamp(min=1).to(out.dtype)
        return out / degree.view(-1, *([1] * (x.dim() - 1))) if reduce == "mean" else out
    if not structure.num_edges:
        return out + 0 * x.sum()
    # The first edge that reaches the maximum wins: its number is the smallest among those that do.
    place = rows.view(-1, *([1] * (x.dim() - 1))).expand_as(messages)
    best = torch.full_like(out, -torch.inf).scatter_reduce(0, place, messages.detach(), "amax")
    number = torch.arange(len(rows), device=x.device).view(-1, *([1] * (x.dim() - 1))).expand_as(messages)
    number = torch.where(messages.detach() == best[rows], number, len(rows))
    winner = torch.full(out.shape, len(rows), device=x.device).scatter_reduce(0, place, number, "amin")
    picked = messages.gather(0, winner.clamp(max=len(rows) - 1))
    return torch.where(winner < len(rows), picked, out)
