"""Temporal attention: what a node is at a time, from its memory and those of its latest neighbours.

Q queries, k events each, R rows, D columns in and out, F features of an event, T of a time, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.nn.temporal.block import Hop
from gnnfleet.nn.temporal.time_encoding import TimeEncoding
from gnnfleet.ops.attend_recent import AttentionDropout, RecentEvents, attend_recent
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.dropout import dropout
from gnnfleet.ops.rounded_matmul import sum_linear_float32

SLOPE = 0.2


class TemporalAttention(torch.nn.Module):
    """LayerNorm(ReLU(Dropout(W [Σ a v, h]))) with a the softmax of LeakyReLU(q · k) over a query's latest events.

    q = W_q [h, Phi(0)], k = W_k [h', e, Phi(since)], v = W_v [h', e, Phi(since)], with h' the other end's row and e the
    event's features. Keys and values are linear in what they are made of, so both products are done once per query.
    """

    def __init__(
        self, width: int, edge_width: int, clock: TimeEncoding, *, heads: int, dropout: float, layer: int
    ) -> None:
        super().__init__()
        self.width, self.heads, self.dropout, self.layer = width, heads, dropout, layer
        self.clock, time_width = clock, len(clock.bias)
        seen = width + edge_width + time_width
        self.query = torch.nn.Linear(width + time_width, width)
        self.key = torch.nn.Linear(seen, width)
        self.value = torch.nn.Linear(seen, width)
        self.out = torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, hop: Hop, rows: Tensor, features: Tensor | None, key: DrawKey) -> Tensor:
        """[Q, D] from rows [R, D] and features [E, F]."""
        own = rows.index_select(0, hop.query)
        query, offset = self._folded_query(own)
        recent = RecentEvents(
            rows, hop.neighbors, features, hop.edge, hop.time_delta, self.clock.weight, self.clock.bias
        )
        drop = (
            AttentionDropout(self.dropout, hop.ids, key.draws(Purpose.ATTENTION, self.layer)) if self._drops else None
        )
        seen, weight = attend_recent(query, offset, recent, slope=SLOPE, drop=drop)
        mixed = self._mixed(own, seen, weight)
        if self._drops:
            mixed = dropout(mixed, self.dropout, ids=hop.ids, draws=key.draws(Purpose.DROPOUT, self.layer))
        return functional.layer_norm(torch.relu(mixed), [self.width], self.norm.weight, self.norm.bias)

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _folded_query(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """(q W_k [Q, H, D + F + T], q b_k [Q, H]) by head, each one product with the rows: W_kᵀ W_q is made first."""
        by_own, by_time = self.query.weight.split_with_sizes([self.width, self.query.in_features - self.width], 1)
        maps, shifts = self._by_head(self.key)
        with torch.autocast("cpu", enabled=False):  # small, and rounded when it is used
            now = functional.linear(self.clock.zero(), by_time, self.query.bias).view(self.heads, -1)
            asks = by_own.view(self.heads, -1, self.width)
            both = torch.einsum("hcw,hcd->hwd", maps, asks).flatten(0, 1)
            add = torch.einsum("hcw,hc->hw", maps, now).flatten()
            toward = torch.einsum("hc,hcd->hd", shifts, asks)
            offset = functional.linear(own, toward, (shifts * now).sum(1))
        query = sum_linear_float32([(own, both)], add)
        return query.view(len(own), self.heads, -1), offset

    def _mixed(self, own: Tensor, seen: Tensor, weight: Tensor) -> Tensor:
        """[Q, D] W [Σ a v, h], values folded into W: heads gather raw columns [Q, H, D + F + T]."""
        by_near, by_own = self.out.weight.split_with_sizes([self.width, self.width], 1)
        maps, shifts = self._by_head(self.value)
        with torch.autocast("cpu", enabled=False):
            heads = by_near.view(self.width, self.heads, -1)
            both = torch.einsum("ohc,hcw->ohw", heads, maps).flatten(1)
            shift = functional.linear(weight, torch.einsum("ohc,hc->oh", heads, shifts))
        return sum_linear_float32([(seen.flatten(1), both), (own, by_own)], self.out.bias) + shift

    def _by_head(self, lin: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        """([H, D / H, D + F + T], [H, D / H])."""
        return lin.weight.view(self.heads, -1, lin.in_features), lin.bias.view(self.heads, -1)
