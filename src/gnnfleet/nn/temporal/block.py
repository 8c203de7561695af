"""What a temporal model looks at: nodes at times, each with its latest events before.

Q queries, k places for events, R rows, E events, F features of an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hop:
    """The queries of one layer. Where a query has had fewer than k events, ``neighbors`` is −1."""

    query: Tensor  # [Q] int64: rows of the nodes asked for
    neighbors: Tensor  # [Q, k] int64: rows of the other ends
    edge: Tensor  # [Q, k] int64: rows of the events' features; any number where near is −1
    time_delta: Tensor  # [Q, k]: time from the event to the query; any number where near is −1
    ids: Tensor  # [Q] int64: what draws of a query go by


@dataclass(frozen=True, eq=False)
class EventBlock:
    """Hops for every layer, the one that reads memories first. A later hop's rows are the queries before it."""

    nodes: Tensor  # [R] int64 node ids, ascending, each once: the rows of the first hop
    hops: tuple[Hop, ...]
    features: Tensor | None = None  # [E, F] of the events that hops speak of

    @property
    def num_queries(self) -> int:
        """Of the last hop."""
        return len(self.hops[-1].query)
