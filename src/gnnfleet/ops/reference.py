"""The kernels in plain torch: reference in tests, and the path on devices without compiled kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws, dropout_mask


def aggregate(
    structure: CSR, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, ties: Tensor | None = None
) -> Tensor:
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
    # By rank among the ties, so that the smallest rank among those that reach the maximum names one edge.
    order = torch.arange(len(rows), device=x.device) if ties is None else torch.argsort(ties)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(rows), device=x.device)
    best = torch.full_like(out, -torch.inf), torch.full(out.shape, len(rows), device=x.device)
    _, winner = running_max(best, rows, messages.detach(), rank)
    picked = messages.gather(0, order[winner.clamp(max=len(rows) - 1)])
    return torch.where(winner < len(rows), picked, out)


def running_max(best: tuple[Tensor, Tensor], rows: Tensor, values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum [R, …], the lowest number of an edge that reaches it), from those so far and more edges."""
    index = rows.view(-1, *([1] * (values.dim() - 1))).expand_as(values)
    top = best[0].scatter_reduce(0, index, values, "amax")
    none = torch.iinfo(torch.int64).max
    numbers = torch.where(_equal(values, top[rows]), number.view(-1, *([1] * (values.dim() - 1))), none)
    before = torch.where(_equal(best[0], top), best[1], none)
    return top, before.scatter_reduce(0, index, numbers, "amin")


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def attend(
    structure: CSR,
    value: Tensor,
    *,
    src: Tensor,
    dst: Tensor,
    score: str,
    heads: int,
    vector: Tensor | None = None,
    edge: Tensor | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
    draws: Draws | None = None,
    edge_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """See ``attend.attend``; every tensor is of two dimensions, [rows, heads · width], and ``vector`` of one."""
    row, col = structure.row.long(), structure.col.long()
    shape, (a, b) = (len(col), heads, src.shape[1] // heads), (src[col], dst[row])
    if score == "dot":
        scores = (a * b).view(shape).sum(-1) * (1 / math.sqrt(shape[2]) if scale is None else scale)
    else:
        scores = torch.nn.functional.leaky_relu(a + b if edge is None else a + b + edge, slope)
        scores = scores if vector is None else (scores * vector).view(shape).sum(-1)
    top = scores.new_full((structure.num_rows, heads), torch.finfo(scores.dtype).min)
    top = top.scatter_reduce(0, row[:, None].expand_as(scores), scores.detach(), "amax")
    weight = (scores - top[row]).exp()
    total = torch.zeros_like(top).index_add(0, row, weight)
    share = weight / total.where(total > 0, torch.ones_like(total))[row]
    if dropout:
        assert draws is not None
        ids = torch.arange(structure.num_edges, device=col.device) if edge_ids is None else edge_ids
        share = share * dropout_mask(share.shape, dropout, ids=ids, draws=draws).to(share)
    message = value.to(share.dtype)[col].view(col.shape[0], heads, value.shape[1] // heads) * share[:, :, None]
    out = message.new_zeros(structure.num_rows, value.shape[1])
    return out.index_add(0, row, message.flatten(1))
