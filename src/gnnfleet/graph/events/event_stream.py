"""Events in the order of time: what a temporal model is trained on. Slices are views; nothing is copied.

Nodes of all types are numbered through (``Graph.node_offsets``). An event's number is its place in the whole stream,
also in a slice (``first`` + row). E events, F features, B batches, D destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.ops.temporal_neighbors import TIME_DTYPES, TemporalNeighbors

# Shares of the time-ordered events up to the end of training and of validation, as TGB splits.
TRAIN_SHARE, VAL_SHARE = 0.70, 0.85


@dataclass(frozen=True, eq=False, kw_only=True)
class EventStream:
    """Events by time, ties in the order they were given. Raises InputError for times that fall."""

    src: Tensor  # [E] int64
    dst: Tensor  # [E] int64
    t: Tensor  # [E] int64 or float64, never falling
    num_nodes: int
    destinations: Tensor  # [D] int64 ascending: what negatives are drawn from
    edge_ids: Tensor  # [E] int64 store edge ids
    msg: Tensor | None = None  # [E, F]
    y: Tensor | None = None  # [E] or [E, C]
    first: int = 0  # number of the first event, in a slice

    def __post_init__(self) -> None:
        if self.t.dtype not in TIME_DTYPES:
            raise InputError(f"times are int64 or float64, found {self.t.dtype}: float32 loses seconds, convert them")

    @classmethod
    def of(cls, graph: Graph, edge_type: EdgeType | str | None = None) -> EventStream:
        """The events of a graph's edge type with times; ConfigError when there is none, or several and none is named.

        Negatives are drawn from all nodes of the destination's type if that
        differs from the source's, else from the nodes that are some event's destination.
        """
        kind = event_edge_type(graph, edge_type)
        edges, offsets = graph.edges[kind], graph.node_offsets
        assert edges.time is not None
        order = torch.argsort(edges.time, stable=True) if edges.order is None else edges.order.long()
        dst = edges.dst()[order].long() + offsets[kind.dst]
        if kind.src == kind.dst:
            destinations = torch.unique(dst)
        else:
            destinations = torch.arange(graph.nodes[kind.dst].count) + offsets[kind.dst]
        return cls(
            src=edges.src[order].long() + offsets[kind.src],
            dst=dst,
            t=edges.time[order],
            num_nodes=graph.num_nodes,
            destinations=destinations,
            edge_ids=order,
            msg=None if edges.attr is None else edges.attr[order],
            y=None if edges.y is None else edges.y[order],
        )

    @classmethod
    def from_arrays(
        cls,
        src: Tensor,
        dst: Tensor,
        t: Tensor,
        *,
        num_nodes: int | None = None,
        msg: Tensor | None = None,
        y: Tensor | None = None,
    ) -> EventStream:
        """From events in any order, sorted stably by time."""
        order = torch.arange(len(t)) if _is_sorted(t) else torch.argsort(t, stable=True)
        ends = torch.cat([src, dst]).long()
        return cls(
            src=src.long()[order],
            dst=dst.long()[order],
            t=t[order],
            num_nodes=(int(ends.max()) + 1 if len(ends) else 0) if num_nodes is None else num_nodes,
            destinations=torch.unique(dst.long()),
            edge_ids=order,
            msg=None if msg is None else msg[order],
            y=None if y is None else y[order],
        )

    def __len__(self) -> int:
        return int(self.src.shape[0])

    @property
    def numbers(self) -> Tensor:
        """[E] int64: the events' places in the whole stream."""
        return torch.arange(self.first, self.first + len(self))

    def slice(self, lo: int, hi: int) -> EventStream:
        """Events lo … hi − 1 of this stream or slice, as a view."""
        lo, hi, _ = slice(lo, hi).indices(len(self))
        return replace(
            self,
            src=self.src[lo:hi],
            dst=self.dst[lo:hi],
            t=self.t[lo:hi],
            edge_ids=self.edge_ids[lo:hi],
            msg=None if self.msg is None else self.msg[lo:hi],
            y=None if self.y is None else self.y[lo:hi],
            first=self.first + lo,
        )

    def concat(self, others: EventStream) -> EventStream:
        """This stream and others behind it, none of them earlier, of the same nodes, with features if it has some."""
        assert self.first == 0, "numbers of events would not agree"
        if len(self) and len(others) and others.t[0] < self.t[-1]:
            raise InputError(f"new events come after those known, found time {others.t[0]} before {self.t[-1]}")
        msg = None if self.msg is None or others.msg is None else torch.cat([self.msg, others.msg])
        return replace(
            self,
            src=torch.cat([self.src, others.src]),
            dst=torch.cat([self.dst, others.dst]),
            t=torch.cat([self.t, others.t]),
            edge_ids=torch.cat([self.edge_ids, len(self) + torch.arange(len(others))]),
            msg=msg,
            y=None,
        )

    def split(self, train: float = TRAIN_SHARE, val: float = VAL_SHARE) -> tuple[EventStream, EventStream, EventStream]:
        """Training, validation and test by TGB's rule: up to the quantiles of time, those included.

        The quantile lies between two neighbouring times, so what is up to it ends with the ties of the lower one: exact
        for any times, where arithmetic on them would round.
        """
        if not 0 < train < val <= 1:
            raise ConfigError(f"a split by time has shares 0 < train < val <= 1, found {train} and {val}")
        first, second = (self._end_of_ties(_floor(share * (len(self) - 1))) for share in (train, val))
        return self.slice(0, first), self.slice(first, second), self.slice(second, len(self))

    def batches(self, size: int, *, keep_ties: bool = True) -> list[int]:
        """[B + 1] boundaries of batches of ``size`` events; batch b is ``slice(bounds[b], bounds[b + 1])``.

        With ``keep_ties`` a batch goes on to the end of the last event's time, so that equal times are never split;
        without it is cut at exactly ``size``, as TGB evaluates.
        """
        if size < 1:
            raise ConfigError(f"a batch has at least one event, found {size}")
        if not keep_ties:
            return [*range(0, len(self), size), len(self)]
        bounds = [0]
        while bounds[-1] < len(self):
            bounds.append(self._end_of_ties(min(bounds[-1] + size, len(self)) - 1))
        return bounds

    def capture_ratio(self, sizes: Sequence[int]) -> list[float]:
        """For each batch size the share of updates that survive if a batch keeps one for each node.

        An event updates both its ends: distinct ends of each batch, summed, over 2 E.
        """
        number = np.arange(len(self))
        return [float((self._previous < number - number % size).sum()) / (2 * len(self)) for size in sizes]

    def bounded_loss_batches(self, loss: float, *, most: int) -> list[int]:
        """Boundaries of the longest batches of up to ``most`` events that lose at most a share ``loss`` of updates.

        Each batch is as long as it may be: a busy stretch gets short ones. Equal times are never split, so a batch
        of one moment may be longer, and lose more.
        """
        if not 0 <= loss < 1 or most < 1:
            raise ConfigError(f"batches lose a share of 0 <= loss < 1 and have most >= 1 events, found {loss}, {most}")
        bounds = [0]
        while bounds[-1] < len(self):
            lo = bounds[-1]
            hi = min(lo + most, len(self))
            lost = (self._previous[:, lo:hi] >= lo).sum(0).cumsum()
            fits = lost <= loss * 2 * np.arange(1, hi - lo + 1)
            fits &= self._ends_ties[lo:hi]
            longest = np.flatnonzero(fits)
            bounds.append(lo + int(longest[-1]) + 1 if len(longest) else self._end_of_ties(lo))
        return bounds

    def neighbours(self) -> TemporalNeighbors:
        """Who met whom before when; numbers of events are rows of this stream, which must not be a slice's rest."""
        assert self.first == 0, "numbers of events would not agree"
        return TemporalNeighbors(self.src, self.dst, self.t, self.num_nodes)

    @cached_property
    def _ends_ties(self) -> NDArray[np.bool_]:
        """[E] bool: whether an event is the last of its time."""
        ends = np.ones(len(self), dtype=bool)
        t = self.t.numpy()
        ends[:-1] = t[1:] != t[:-1]
        return ends

    @cached_property
    def _previous(self) -> NDArray[np.int64]:
        """[2, E]: the event that last updated each end before this one, −1 for none; a loop updates its node once."""
        ends = np.stack([self.src.numpy(), self.dst.numpy()], 1).reshape(-1)
        order = np.argsort(ends, kind="stable")
        previous = np.full(len(ends), -1, dtype=np.int64)
        same = ends[order[1:]] == ends[order[:-1]]
        previous[order[1:][same]] = order[:-1][same] // 2
        return np.ascontiguousarray(previous.reshape(-1, 2).T)

    def _end_of_ties(self, row: int) -> int:
        """Where the events of the same time as ``row`` end."""
        return int(torch.searchsorted(self.t, self.t[row : row + 1], right=True)) if len(self) else 0


def is_event_graph(graph: Graph) -> bool:
    """Whether events are what there is to learn from: edges have times, and nodes no labels or no features."""
    labels, features = (any(getattr(nodes, name) is not None for nodes in graph.nodes.values()) for name in ("y", "x"))
    return any(edges.time is not None for edges in graph.edges.values()) and not (labels and features)


def event_edge_type(graph: Graph, edge_type: EdgeType | str | None) -> EdgeType:
    """The edge type with times, or the one that is named; raises ConfigError when there is none, or several."""
    timed = [kind for kind, edges in graph.edges.items() if edges.time is not None]
    if edge_type is not None:
        kind = EdgeType.parse(edge_type) if isinstance(edge_type, str) else edge_type
        if kind not in timed:
            raise ConfigError(f"edges {kind} have no times; those with times: {', '.join(map(str, timed)) or 'none'}")
        return kind
    if not timed:
        raise ConfigError(
            f"{graph.name}: no edges with times; import a table of events with a column of times (--time COLUMN)"
        )
    if len(timed) > 1:
        raise ConfigError(f"several edge types have times ({', '.join(map(str, timed))}): name one")
    return timed[0]


def _is_sorted(t: Tensor) -> bool:
    return bool((t[1:] >= t[:-1]).all())


def _floor(place: float) -> int:
    """The whole number below a place between rows; products like 0.7 · 10 may end just below theirs."""
    return int(place + 1e-9)
