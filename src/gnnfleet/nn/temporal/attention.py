"""Temporal graph attention (Xu et al., https://arxiv.org/abs/2002.07962) over the latest events of a node.

Q queries, k events each, R rows, D columns in and out, F features of an event, T of a time, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.ops.attend_recent import AttentionDropout, RecentEvents, attend_recent
from gnnfleet.ops.draws import DrawKey, Purpose, dropout
from gnnfleet.ops.gru import time_features
from gnnfleet.ops.rounded_matmul import sum_linear_float32


class TimeEncoding(torch.nn.Module):
    """Phi(t) = cos(w t + b), [n] → [n, T]; w from 1 / ``shortest`` to 1 / ``longest``, log-spaced, b = 0.

    Frequencies are constant unless ``learnt``: Adam moves all weights by similar amounts, so a step changes slow
    frequencies completely, and with them the meaning of all memories.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, shortest: float = 1.0, longest: float = 1e9, *, learnt: bool = False) -> None:
        super().__init__()
        ends = torch.tensor([shortest, max(longest, shortest)], dtype=torch.float64)
        periods = torch.linspace(0, 1, width, dtype=torch.float64) * (ends[1] / ends[0]).log()
        tensors = {"weight": (-periods).exp().div_(ends[0]).float(), "bias": torch.zeros(width)}
        for name, tensor in tensors.items():
            if learnt:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, time_delta: Tensor) -> Tensor:
        return time_features(time_delta, self.weight, self.bias)

    def zero(self) -> Tensor:
        """[T] encoding of time 0."""
        return torch.cos(self.bias)


@dataclass(frozen=True, eq=False)
class Hop:
    """Queries of one layer. ``neighbors`` is −1 where a query has had fewer than k events."""

    query: Tensor  # [Q] int64: rows of the queried nodes
    neighbors: Tensor  # [Q, k] int64: rows of the other ends
    edge: Tensor  # [Q, k] int64: rows of the events' features; arbitrary where neighbors is −1
    time_delta: Tensor  # [Q, k]: time from the event to the query; arbitrary where neighbors is −1
    ids: Tensor  # [Q] int64: ids of the random draws of a query


@dataclass(frozen=True, eq=False)
class EventBlock:
    """Hops of all layers, first the one that reads memories. Rows of a later hop are the queries of the hop before."""

    nodes: Tensor  # [R] int64 node ids, ascending, each once: the rows of the first hop
    hops: tuple[Hop, ...]
    features: Tensor | None = None  # [E, F] of all events


SLOPE = 0.2


class TemporalAttention(torch.nn.Module):
    """LayerNorm(ReLU(Dropout(W [Σ a v, h]))) with a the softmax of LeakyReLU(q · k) over a query's latest events.

    q = W_q [h, Phi(0)], k = W_k [h', e, Phi(since)], v = W_v [h', e, Phi(since)], with h' the other end's row and e the
    event's features. Keys and values are linear in their inputs, so both products are done once per query.
    """

    def __init__(
        self, width: int, edge_width: int, time_encoding: TimeEncoding, *, heads: int, dropout: float, layer: int
    ) -> None:
        super().__init__()
        self.width, self.heads, self.dropout, self.layer = width, heads, dropout, layer
        self.clock, time_width = time_encoding, len(time_encoding.bias)
        event_width = width + edge_width + time_width
        self.query = torch.nn.Linear(width + time_width, width)
        self.key = torch.nn.Linear(event_width, width)
        self.value = torch.nn.Linear(event_width, width)
        self.out = torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, hop: Hop, rows: Tensor, features: Tensor | None, key: DrawKey) -> Tensor:
        """rows [R, D], features [E, F] → [Q, D]."""
        query_rows = rows.index_select(0, hop.query)
        query, offset = self._folded_query(query_rows)
        recent = RecentEvents(
            rows, hop.neighbors, features, hop.edge, hop.time_delta, self.clock.weight, self.clock.bias
        )
        drop = (
            AttentionDropout(self.dropout, hop.ids, key.draws(Purpose.ATTENTION, self.layer)) if self._drops else None
        )
        gathered, weight = attend_recent(query, offset, recent, slope=SLOPE, drop=drop)
        mixed = self._mixed(query_rows, gathered, weight)
        if self._drops:
            mixed = dropout(mixed, self.dropout, ids=hop.ids, draws=key.draws(Purpose.DROPOUT, self.layer))
        return functional.layer_norm(torch.relu(mixed), [self.width], self.norm.weight, self.norm.bias)

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _folded_query(self, query_rows: Tensor) -> tuple[Tensor, Tensor]:
        """(q W_k [Q, H, D + F + T], q b_k [Q, H]) by head, from one product with the rows: W_kᵀ W_q is folded first."""
        widths = [self.width, self.query.in_features - self.width]
        row_weight, time_weight = self.query.weight.split_with_sizes(widths, 1)
        key_weight, key_bias = self._by_head(self.key)
        with torch.autocast("cpu", enabled=False):  # small products, rounded where they are used
            time_query = functional.linear(self.clock.zero(), time_weight, self.query.bias).view(self.heads, -1)
            row_queries = row_weight.view(self.heads, -1, self.width)
            folded = torch.einsum("hcw,hcd->hwd", key_weight, row_queries).flatten(0, 1)
            bias = torch.einsum("hcw,hc->hw", key_weight, time_query).flatten()
            offset_weight = torch.einsum("hc,hcd->hd", key_bias, row_queries)
            offset = functional.linear(query_rows, offset_weight, (key_bias * time_query).sum(1))
        query = sum_linear_float32([(query_rows, folded)], bias)
        return query.view(len(query_rows), self.heads, -1), offset

    def _mixed(self, query_rows: Tensor, gathered: Tensor, weight: Tensor) -> Tensor:
        """[Q, D] W [Σ a v, h] from gathered raw columns [Q, H, D + F + T], with values folded into W."""
        value_weight, row_weight = self.out.weight.split_with_sizes([self.width, self.width], 1)
        event_weight, event_bias = self._by_head(self.value)
        with torch.autocast("cpu", enabled=False):
            heads = value_weight.view(self.width, self.heads, -1)
            folded = torch.einsum("ohc,hcw->ohw", heads, event_weight).flatten(1)
            bias = functional.linear(weight, torch.einsum("ohc,hc->oh", heads, event_bias))
        return sum_linear_float32([(gathered.flatten(1), folded), (query_rows, row_weight)], self.out.bias) + bias

    def _by_head(self, lin: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        """([H, D / H, D + F + T], [H, D / H])."""
        return lin.weight.view(self.heads, -1, lin.in_features), lin.bias.view(self.heads, -1)
