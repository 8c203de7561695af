"""Event streams, the input of temporal models: timed edges in time order. Slices are views without copies.

Nodes of all types share one numbering (``Graph.node_offsets``). The number of an event is its position in the stream,
also in a slice (``first`` + row). Negative destinations are functions of seed, sweep, event and set, equal for any
number of workers. E or n events, F features, B batches, N or D destinations, k negatives of an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.sampling.negatives import EVALUATION, SINGLE, TRAINING
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.ops.temporal_neighbors import TIME_DTYPES, TemporalNeighbors

# Shares of the time-ordered events up to the end of training and of validation, as TGB splits.
TRAIN_SHARE, VAL_SHARE = 0.70, 0.85


@dataclass(frozen=True, eq=False, kw_only=True)
class EventStream:
    """Events by time, ties in input order. Raises InputError for times of another dtype."""

    src: Tensor  # [E] int64
    dst: Tensor  # [E] int64
    t: Tensor  # [E] int64 or float64, non-decreasing
    num_nodes: int
    destinations: Tensor  # [D] int64 ascending, the candidates for negatives
    edge_ids: Tensor  # [E] int64 store edge ids
    msg: Tensor | None = None  # [E, F]
    y: Tensor | None = None  # [E] or [E, C]
    first: int = 0  # number of the first event, in a slice

    def __post_init__(self) -> None:
        if self.t.dtype not in TIME_DTYPES:
            raise InputError(f"event times must be int64 or float64, found {self.t.dtype}: convert them")

    @classmethod
    def of(cls, graph: Graph, edge_type: EdgeType | str | None = None) -> EventStream:
        """The events of the edge type with times; raises ConfigError like ``event_edge_type``.

        Negatives are drawn from all nodes of the destination type if it differs from the source type, else from the
        destinations of events.
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

    def __len__(self) -> int:
        return int(self.src.shape[0])

    @property
    def numbers(self) -> Tensor:
        """[E] int64 numbers of the events."""
        return torch.arange(self.first, self.first + len(self))

    def slice(self, lo: int, hi: int) -> EventStream:
        """View of the events with rows lo … hi − 1."""
        lo, hi, _ = slice(lo, hi).indices(len(self))
        columns = {name: getattr(self, name) for name in ("src", "dst", "t", "edge_ids", "msg", "y")}
        parts: dict[str, Any] = {name: None if column is None else column[lo:hi] for name, column in columns.items()}
        return replace(self, **parts, first=self.first + lo)

    def concat(self, later: EventStream) -> EventStream:
        """Append later events of the same nodes; labels are dropped, and features too if either stream has none."""
        assert self.first == 0, "events of a slice keep their numbers, so a slice cannot be extended"
        if len(self) and len(later) and later.t[0] < self.t[-1]:
            raise InputError(
                f"new events must not be earlier than the last event, found time {later.t[0]} before {self.t[-1]}"
            )
        return replace(
            self,
            src=torch.cat([self.src, later.src]),
            dst=torch.cat([self.dst, later.dst]),
            t=torch.cat([self.t, later.t]),
            edge_ids=torch.cat([self.edge_ids, len(self) + torch.arange(len(later))]),
            msg=None if self.msg is None or later.msg is None else torch.cat([self.msg, later.msg]),
            y=None,
        )

    def split(self, train: float = TRAIN_SHARE, val: float = VAL_SHARE) -> tuple[EventStream, EventStream, EventStream]:
        """Split into training, validation and test by TGB's rule: up to the quantiles of time, inclusive.

        A quantile lies between two neighbouring times, so the part ends with the ties of the lower one. This is exact
        for any times; arithmetic on times would round.
        """
        if not 0 < train < val <= 1:
            raise ConfigError(f"shares of a split by time must be 0 < train < val <= 1, found {train} and {val}")
        # Products such as 0.7 · 10 may be slightly below the integer.
        first, second = (self._end_of_ties(int(share * (len(self) - 1) + 1e-9)) for share in (train, val))
        return self.slice(0, first), self.slice(first, second), self.slice(second, len(self))

    def batches(self, size: int, *, keep_ties: bool = True) -> list[int]:
        """[B + 1] boundaries of batches of ``size`` events; batch b is ``slice(bounds[b], bounds[b + 1])``.

        With ``keep_ties`` a batch extends to the last event of equal time. Without, every batch has exactly ``size``
        events, as in TGB's evaluation.
        """
        if size < 1:
            raise ConfigError(f"a batch must have at least 1 event, found {size}")
        if not keep_ties:
            return [*range(0, len(self), size), len(self)]
        bounds = [0]
        while bounds[-1] < len(self):
            bounds.append(self._end_of_ties(min(bounds[-1] + size, len(self)) - 1))
        return bounds

    def capture_ratio(self, sizes: Sequence[int]) -> list[float]:
        """For each batch size, the share of updates that remain if a batch keeps one update per node.

        An event updates both its ends, so this is the number of distinct ends, summed over batches, divided by 2 E.
        """
        number = np.arange(len(self))
        return [float((self._previous < number - number % size).sum()) / (2 * len(self)) for size in sizes]

    def temporal_neighbors(self) -> TemporalNeighbors:
        """Index the neighbours of every node by time; the stream must start with event 0."""
        assert self.first == 0, "rows of a later slice are not the numbers of its events"
        return TemporalNeighbors(self.src, self.dst, self.t, self.num_nodes)

    @cached_property
    def _previous(self) -> NDArray[np.int64]:
        """[2, E]: the previous event that updated each end, −1 for none; a self-loop updates its node once."""
        ends = np.stack([self.src.numpy(), self.dst.numpy()], 1).reshape(-1)
        order = np.argsort(ends, kind="stable")
        previous = np.full(len(ends), -1, dtype=np.int64)
        same = ends[order[1:]] == ends[order[:-1]]
        previous[order[1:][same]] = order[:-1][same] // 2
        return np.ascontiguousarray(previous.reshape(-1, 2).T)

    def _end_of_ties(self, row: int) -> int:
        """The row after the last event with the time of ``row``."""
        return int(torch.searchsorted(self.t, self.t[row : row + 1], right=True)) if len(self) else 0


def is_event_graph(graph: Graph) -> bool:
    """True if events are the natural training target: edges have times, and nodes lack labels or features."""
    labels, features = (any(getattr(nodes, name) is not None for nodes in graph.nodes.values()) for name in ("y", "x"))
    return any(edges.time is not None for edges in graph.edges.values()) and not (labels and features)


def event_edge_type(graph: Graph, edge_type: EdgeType | str | None) -> EdgeType:
    """The named edge type, or the only one with times; raises ConfigError if it has no times or several types do."""
    timed = [kind for kind, edges in graph.edges.items() if edges.time is not None]
    if edge_type is not None:
        kind = EdgeType.parse(edge_type) if isinstance(edge_type, str) else edge_type
        if kind not in timed:
            raise ConfigError(f"edges {kind} have no times; those with times: {', '.join(map(str, timed)) or 'none'}")
        return kind
    if not timed:
        raise ConfigError(
            f"{graph.name}: no edges have times: import a table of events with a time column (--time COLUMN)"
        )
    if len(timed) > 1:
        raise ConfigError(f"several edge types have times ({', '.join(map(str, timed))}): name one")
    return timed[0]


MAX_REJECTION_COUNT = 49
"""Default number of negatives per event in evaluations that do not rank all destinations."""


@dataclass(frozen=True, eq=False)
class NegativeSampler:
    """Draws distinct destinations other than the event's own, uniformly."""

    destinations: Tensor  # [N] int64 ascending
    seed: int = 0

    def for_training(self, events: Tensor, positive: Tensor, *, sweep: int, number: int = 0, count: int = 1) -> Tensor:
        """[n, count] for events with numbers [n] and true destinations [n], in set ``number`` of a sweep."""
        draws = DrawKey(self.seed, sweep).draws(Purpose.NEGATIVE, TRAINING, number)
        return self._draw(draws, events, positive, count)

    def for_evaluation(self, events: Tensor, positive: Tensor, *, count: int = MAX_REJECTION_COUNT) -> Tensor:
        """[n, count] for validation and test; they depend on the seed and the event only."""
        return self._draw(DrawKey(self.seed).draws(Purpose.NEGATIVE, EVALUATION), events, positive, count)

    def single_column(self, events: Tensor, count: int) -> Tensor:
        """[n] random column of ``for_evaluation`` to use as the single negative of each event."""
        return (DrawKey(self.seed).draws(Purpose.NEGATIVE, SINGLE).uniforms_at(events)[:, 0] * count).long()

    def _draw(self, draws: Draws, events: Tensor, positive: Tensor, count: int) -> Tensor:
        """Floyd's random subset of the other positions: uniform as a set, but not column by column."""
        if count >= len(self.destinations):
            raise ConfigError(
                f"{count} negatives need {count + 1} destinations, found {len(self.destinations)}: use fewer negatives"
            )
        total = len(self.destinations)
        position = torch.searchsorted(self.destinations, positive).clamp_(max=total - 1)
        position[self.destinations[position] != positive] = total  # a new node: no destination is excluded
        others = total - (position < total).long()
        uniforms = draws.uniforms_at(events, count)
        chosen = torch.empty(len(events), count, dtype=torch.int64)
        for column in range(count):
            last = others - count + column
            pick = (uniforms[:, column] * (last + 1)).long()
            repeated = (chosen[:, :column] == pick[:, None]).any(1)
            chosen[:, column] = torch.where(repeated, last, pick)
        return self.destinations[chosen + (chosen >= position[:, None])]


class AllDestinations:
    """TGB's full rule: all destinations are negatives except those of events with the same source and time."""

    def __init__(self, stream: EventStream) -> None:
        # Takes the whole stream: events of one time may lie in several batches.
        self.destinations = stream.destinations
        time = torch.zeros(len(stream), dtype=torch.int64)
        time[1:] = (stream.t[1:] != stream.t[:-1]).cumsum(0)
        self._key = time * stream.num_nodes + stream.src  # one number per source and time
        self._positions = torch.searchsorted(stream.destinations, stream.dst)
        self._order = torch.argsort(self._key, stable=True)
        self._sorted = self._key[self._order]

    def mask(self, lo: int, hi: int) -> Tensor:
        """[hi − lo, N] bool: the destinations that are negatives of the events with numbers lo … hi − 1."""
        key = self._key[lo:hi]
        first = torch.searchsorted(self._sorted, key)
        sizes = torch.searchsorted(self._sorted, key, right=True) - first
        rows = torch.repeat_interleave(torch.arange(hi - lo), sizes)
        within = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
        mask = torch.ones(hi - lo, len(self.destinations), dtype=torch.bool)
        mask[rows, self._positions[self._order[first[rows] + within]]] = False
        return mask
