"""Attention of queries over their latest events, without a projected row per event.

A score is a dot product of the query with [row of the other end, features, cosines of the time]. Callers fold the key
projection into the query, and the value projection into the output.
Q queries, k events each, H heads, W = D + F + T columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.draws import Draws, drop_threshold, dropout
from gnnfleet.ops.native import _native, num_threads


@dataclass(frozen=True, eq=False)
class RecentEvents:
    """Events of the queries. ``neighbors`` is −1 where a query has fewer events; there ``edge`` is any row."""

    rows: Tensor  # [R, D]
    neighbors: Tensor  # [Q, k] rows of ``rows``
    features: Tensor | None  # [E, F]
    edge: Tensor  # [Q, k] rows of ``features``
    since: Tensor  # [Q, k]
    weight: Tensor  # [T] frequencies
    bias: Tensor  # [T] phases


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights, keyed by query id."""

    p: float
    ids: Tensor  # [Q] int64
    draws: Draws


def attend_recent(
    query: Tensor, offset: Tensor, recent: RecentEvents, *, slope: float, drop: AttentionDropout | None
) -> tuple[Tensor, Tensor]:
    """([Q, H, W] weighted sum per head, [Q, H] sum of the weights), zeros for a query without events.

    A score is LeakyReLU(query · [row, features, cos(since · weight + bias)] + offset); query [Q, H, W], offset [Q, H].
    Features have no gradient.
    """
    if query.device.type != "cpu" or not recent.neighbors.numel():
        return attend_recent_reference(query, offset, recent, slope=slope, drop=drop)
    outputs: tuple[Tensor, Tensor] = _AttendRecent.apply(  # type: ignore[no-untyped-call]
        (recent, slope, drop), query, offset, recent.rows, recent.weight, recent.bias
    )
    return outputs


def attend_recent_reference(
    query: Tensor, offset: Tensor, recent: RecentEvents, *, slope: float, drop: AttentionDropout | None
) -> tuple[Tensor, Tensor]:
    """The same in torch: reference of the kernel, and the path on other devices."""
    valid = recent.neighbors >= 0
    parts = [recent.rows[recent.neighbors.clamp(min=0)]]
    if recent.features is not None:
        parts.append(recent.features[recent.edge].to(query.dtype))
    parts.append(torch.cos(recent.since[..., None] * recent.weight + recent.bias))
    x = torch.cat(parts, 2)
    score = functional.leaky_relu(query @ x.transpose(1, 2) + offset[..., None], slope)
    score = score.masked_fill(~valid[:, None], -torch.inf)
    score = torch.where(valid.any(1)[:, None, None], score, 0.0)
    share = torch.softmax(score, 2) * valid[:, None]
    if drop is not None and drop.p:
        share = dropout(share, drop.p, ids=drop.ids, draws=drop.draws)
    return share @ x, share.sum(2)


def _kernel_args(
    spec: tuple[RecentEvents, float, AttentionDropout | None], query: Tensor, offset: Tensor, rows: Tensor
) -> dict[str, Any]:
    """Arguments that forward and backward share."""
    recent, slope, drop = spec
    key, stream = (0, 0) if drop is None else drop.draws.kernel_args
    p = 0.0 if drop is None else drop.p
    width = query.shape[2] - rows.shape[1] - len(recent.weight)
    return {
        "query": query,
        "offset": offset,
        "row": rows,
        "near": recent.neighbors.contiguous(),
        "feature": recent.features if width else None,
        "edge": recent.edge.contiguous(),
        "since": recent.since.to(query.dtype).contiguous(),
        "frequency": recent.weight.detach(),
        "phase": recent.bias.detach(),
        "slope": slope,
        "ids": None if drop is None else drop.ids,
        "key": key,
        "place": stream,
        "threshold": drop_threshold(p) if p else 0,
        "scale": 1 / (1 - p),
        "threads": num_threads(query.numel() * recent.neighbors.shape[1]),
    }


class _AttendRecent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: tuple[RecentEvents, float, AttentionDropout | None],
        query: Tensor,
        offset: Tensor,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        query, offset, rows = query.contiguous(), offset.contiguous(), rows.contiguous()
        out, total = empty_buffer(query.shape, query.dtype), torch.empty_like(offset)
        score = torch.empty(*offset.shape, spec[0].neighbors.shape[1], dtype=query.dtype)
        _native.attend_recent(**_kernel_args(spec, query, offset, rows), score=score, out=out, weight=total)
        ctx.spec = spec
        ctx.save_for_backward(query, offset, rows, score)
        return out, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Any, ...]:
        query, offset, rows, score = ctx.saved_tensors
        weight = ctx.spec[0].weight
        dquery, doffset = empty_buffer(query.shape, query.dtype), torch.empty_like(offset)
        drows = empty_buffer(rows.shape, rows.dtype) if ctx.needs_input_grad[3] else None
        dweight, dbias = (torch.empty(len(weight), dtype=query.dtype) for _ in range(2))
        _native.attend_recent_back(
            **_kernel_args(ctx.spec, query, offset, rows),
            score=score,
            grad_out=grad.contiguous(),
            grad_weight=grad_total.contiguous(),
            grad_query=dquery,
            grad_offset=doffset,
            grad_row=drows,
            grad_frequency=dweight,
            grad_phase=dbias,
        )
        return None, dquery, doffset, drows, dweight, dbias
