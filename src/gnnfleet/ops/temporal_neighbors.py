"""Temporal neighbours of a node before a time: the latest, or drawn uniformly.

Events are numbered in stream order. "Before" is strict: events at the time of a query are no neighbours.
n queries, k neighbours each, E events.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.native import _native, num_threads

# Cost of a query in multiply-adds; see ``native.num_threads``.
_WORK = 128
TIME_DTYPES = (torch.int64, torch.float64)


class PairHistory(NamedTuple):
    """Common events of node pairs, [n, k] int64 each."""

    number: Tensor  # of common events
    gap: Tensor  # the source's events since the last common one, 1 if it was its latest; 0 without common events
    last: Tensor  # the number of that event, −1 without one


class TemporalNeighbors:
    """The events of every node, as source or destination, oldest first; more may be appended.

    An event of a node with itself is listed once. Times are int64 or float64 and never decrease; float32 is rejected
    because it cannot resolve the seconds of a year.
    """

    def __init__(self, src: Tensor, dst: Tensor, t: Tensor, num_nodes: int) -> None:
        self._table = _native.TemporalNeighbors(num_nodes)
        self._num_nodes = num_nodes
        self._t = torch.empty(0, dtype=t.dtype)
        self.append(src, dst, t)

    @property
    def num_events(self) -> int:
        return int(self._table.num_events)

    @property
    def nbytes(self) -> int:
        return int(self._table.bytes) + self._t.nbytes

    @property
    def t(self) -> Tensor:
        """[E] times of all events, including appended ones."""
        return self._t[: self.num_events]

    def append(self, src: Tensor, dst: Tensor, t: Tensor) -> None:
        """Append events, none before the last one; otherwise raises InputError and adds nothing."""
        before, after = self.num_events, self.num_events + t.shape[0]
        self._check_times(t)
        if t.dtype not in TIME_DTYPES or not src.shape == dst.shape == t.shape:
            raise InputError(
                f"events need sources, destinations and times of equal length, times int64 or float64; found "
                f"{list(src.shape)}, {list(dst.shape)}, {list(t.shape)} {t.dtype}"
            )
        last = self._t[before - 1 : before]
        if not bool((torch.cat([last, t]).diff() >= 0).all()):
            raise InputError("events are not in the order of their times: sort them")
        try:
            self._table.append(src.long().contiguous(), dst.long().contiguous())
        except IndexError as error:
            raise InputError(f"events have nodes outside 0 to {self._num_nodes - 1}") from error
        if after > self._t.shape[0]:
            # Exact for the first events, doubled when more are appended.
            grown = torch.empty(max(after, 2 * before), dtype=t.dtype)
            grown[:before] = self._t[:before]
            self._t = grown
        self._t[before:after] = t

    def count_before(self, times: Tensor, *, visible: int | Tensor | None = None) -> Tensor:
        """[n] int64: number of events strictly before each time, among the first ``visible`` ones."""
        self._check_times(times)
        counts = torch.searchsorted(self.t, times.contiguous())
        if visible is None:
            return counts
        return counts.clamp_(max=visible) if isinstance(visible, int) else torch.minimum(counts, visible)

    def latest(
        self, nodes: Tensor, times: Tensor, k: int, *, visible: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(neighbours, events), both [n, k] int64: the latest before ``times``, latest first, padded with −1.

        ``visible`` hides events with that number or a higher one. A node −1 has no neighbours, so the result can be
        queried again for the next hop, at the times of its events (``times_of``).
        """
        out = self._out(nodes, k)
        self._table.recent(
            nodes.contiguous(), self.count_before(times, visible=visible), *out, num_threads(nodes.shape[0] * _WORK)
        )
        return out

    def sample_uniform(
        self, nodes: Tensor, times: Tensor, k: int, key: DrawKey, *, hop: int = 0, visible: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As ``latest``, but k drawn uniformly without replacement from all before ``times``; latest first.

        Draws are keyed by the key, the hop, the node and the number of earlier events, not by the query's position.
        """
        out = self._out(nodes, k)
        before = self.count_before(times, visible=visible)
        kernel_args = key.draws(Purpose.SAMPLE, hop).kernel_args
        self._table.uniform(nodes.contiguous(), before, *kernel_args, *out, num_threads(nodes.shape[0] * _WORK))
        return out

    def counts(self, nodes: Tensor, before: Tensor) -> Tensor:
        """[n] int64: number of events of nodes among the first ``before`` [n] of the stream (see ``count_before``)."""
        out = torch.empty(nodes.shape[0], dtype=torch.int64)
        self._check_nodes(nodes)
        self._table.counts(nodes.contiguous(), before.contiguous(), out, num_threads(nodes.shape[0] * _WORK))
        return out

    def pair_history(self, src: Tensor, dst: Tensor, before: Tensor, *, depth: int) -> PairHistory:
        """Common events of sources [n] with each of ``dst`` [n, k] among their latest ``depth`` events before."""
        history = PairHistory(*(torch.empty(dst.shape, dtype=torch.int64) for _ in range(3)))
        self._check_nodes(src)
        threads = num_threads((dst.numel() + len(src) * 8) * _WORK)
        self._table.meetings(src.contiguous(), before.contiguous(), dst.contiguous(), depth, *history, threads)
        return history

    def times_of(self, events: Tensor) -> Tensor:
        """Times of events, of any shape; for −1 the time of the first event, before which there is none."""
        return self._t[events.clamp(min=0)]

    def _out(self, nodes: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self._check_nodes(nodes)
        shape = (nodes.shape[0], k)
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)

    def _check_nodes(self, nodes: Tensor) -> None:
        if nodes.numel() and int(nodes.max()) >= self._num_nodes:
            raise InputError(f"node {int(nodes.max())} does not exist: nodes are 0 to {self._num_nodes - 1}")

    def _check_times(self, times: Tensor) -> None:
        if times.dtype != self._t.dtype:
            raise InputError(
                f"times are {times.dtype}, but those of this stream are {self._t.dtype}: convert one of them"
            )
