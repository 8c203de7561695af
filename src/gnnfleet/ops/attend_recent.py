"""Attention of a query over its latest events, without a projected row for any event.

A score is a dot product of the query with [row of the other end, features, cosines of the time], so keys need no
product of their own: whoever calls folds them into the query, and values into what comes out.
Q queries, k events each, H heads, D + F + T columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.ops.draws import Draws
from gnnfleet.ops.dropout import dropout


@dataclass(frozen=True, eq=False)
class Recent:
    """What queries look at. ``near`` is −1 where a query has fewer events."""

    rows: Tensor  # [R, D]
    near: Tensor  # [Q, k] rows of ``rows``
    features: Tensor | None  # [E, F]
    edge: Tensor  # [Q, k] rows of ``features``
    since: Tensor  # [Q, k]
    weight: Tensor  # [T] frequencies
    bias: Tensor  # [T] phases


@dataclass(frozen=True, eq=False)
class Drop:
    """Dropout of attention, by query."""

    p: float
    ids: Tensor  # [Q] int64
    draws: Draws


def attend_recent(
    query: Tensor, offset: Tensor, recent: Recent, *, slope: float, drop: Drop | None
) -> tuple[Tensor, Tensor]:
    """([Q, H, D + F + T] what each head gathers, [Q, H] its weights summed), zeros for a query without events.

    A score is LeakyReLU(query · [row, features, cos(since · weight + bias)] + offset); query [Q, H, D + F + T].
    """
    seen = recent.near >= 0
    parts = [recent.rows[recent.near.clamp(min=0)]]
    if recent.features is not None:
        parts.append(recent.features[recent.edge.clamp(min=0)])
    parts.append(torch.cos(recent.since[..., None] * recent.weight + recent.bias))
    x = torch.cat([part.to(query.dtype) for part in parts], 2)  # [Q, k, D + F + T]
    score = torch.nn.functional.leaky_relu(query @ x.transpose(1, 2) + offset[..., None], slope)
    score = score.masked_fill(~seen[:, None], -torch.inf)
    score = torch.where(seen.any(1)[:, None, None], score, 0.0)
    share = torch.softmax(score, 2) * seen[:, None]
    if drop is not None and drop.p:
        share = dropout(share, drop.p, ids=drop.ids, draws=drop.draws)
    return share @ x, share.sum(2)
