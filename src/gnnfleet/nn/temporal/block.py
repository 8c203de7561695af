"""Input of a temporal model: queries (a node at a time), each with events before it.

Q queries, k events per query, R rows, E events, F features of an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
