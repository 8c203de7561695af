"""Neighbours in time: with whom a node met before some moment, the latest first or drawn evenly.

Events are numbered in stream order. "Before a time" means strictly: an event is no neighbour of a question asked at its
own time, nor are others of the same time. n questions, k neighbours each, E events.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.native import _native, num_threads

# A question costs about as much as this many multiply-adds; see ``native.num_threads``.
_WORK = 128
TIME_DTYPES = (torch.int64, torch.float64)


class PairHistory(NamedTuple):
    """What two nodes had to do with each other, [n, k] int64 each."""

    number: Tensor  # of meetings
    gap: Tensor  # the source's events from the last meeting on, 1 where it was its latest; 0 where they did not meet
    last: Tensor  # the number of that event, −1 where they did not


class TemporalNeighbors:
    """The events of every node, both ends alike, oldest first; more may be appended.

    An event of a node with itself is listed once. Times are int64 or float64 and never fall; float32 is refused, it
    cannot tell seconds of a year apart.
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
        """[E] times of all events, those appended included."""
        return self._t[: self.num_events]

    def append(self, src: Tensor, dst: Tensor, t: Tensor) -> None:
        """More events, none before the last one; raises InputError, with nothing added, for others."""
        before, after = self.num_events, self.num_events + t.shape[0]
        self._check_times(t)
        if t.dtype not in TIME_DTYPES or not src.shape == dst.shape == t.shape:
            raise InputError(
                f"events are sources, destinations and times of one length, times int64 or float64; found "
                f"{list(src.shape)}, {list(dst.shape)}, {list(t.shape)} {t.dtype}"
            )
        last = self._t[before - 1 : before]
        if not bool((torch.cat([last, t]).diff() >= 0).all()):
            raise InputError("events come in the order of their times, found an earlier one behind a later: sort them")
        try:
            self._table.append(src.long().contiguous(), dst.long().contiguous())
        except IndexError as error:
            raise InputError(f"events are among nodes 0 to {self._num_nodes - 1}, found others") from error
        if after > self._t.shape[0]:
            # Exactly what the first events need, twice as much whenever more come.
            room = torch.empty(max(after, 2 * before), dtype=t.dtype)
            room[:before] = self._t[:before]
            self._t = room
        self._t[before:after] = t

    def count_before(self, times: Tensor, *, visible: int | Tensor | None = None) -> Tensor:
        """[n] int64: how many events happened strictly before each time, of the first ``visible`` ones."""
        self._check_times(times)
        found = torch.searchsorted(self.t, times.contiguous())
        if visible is None:
            return found
        return found.clamp_(max=visible) if isinstance(visible, int) else torch.minimum(found, visible)

    def latest(
        self, nodes: Tensor, times: Tensor, k: int, *, visible: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(neighbours, events), both [n, k] int64: the latest before ``times``, latest first, −1 where none are left.

        ``visible`` hides events with that number or a higher one. A node −1 has no neighbours, so the answer may be
        asked again for the next hop, at the times of its events (``times_of``).
        """
        out = self._out(nodes, k)
        self._table.recent(
            nodes.contiguous(), self.count_before(times, visible=visible), *out, num_threads(nodes.shape[0] * _WORK)
        )
        return out

    def sample_uniform(
        self,
        nodes: Tensor,
        times: Tensor,
        k: int,
        key: DrawKey,
        *,
        hop: int = 0,
        visible: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``latest``, but k drawn evenly without replacement from all before ``times``; latest first.

        A draw goes by the key, the hop, the node and the number of events before, not by the place of a question.
        """
        out = self._out(nodes, k)
        before = self.count_before(times, visible=visible)
        words = key.draws(Purpose.SAMPLE, hop).words
        self._table.uniform(nodes.contiguous(), before, *words, *out, num_threads(nodes.shape[0] * _WORK))
        return out

    def counts(self, nodes: Tensor, before: Tensor) -> Tensor:
        """[n] int64: how many events nodes have had among the first ``before`` [n] of the stream (see ``before``)."""
        out = torch.empty(nodes.shape[0], dtype=torch.int64)
        self._check_nodes(nodes)
        self._table.counts(nodes.contiguous(), before.contiguous(), out, num_threads(nodes.shape[0] * _WORK))
        return out

    def pair_history(self, src: Tensor, dst: Tensor, before: Tensor, *, depth: int) -> PairHistory:
        """What sources [n] had to do with each of ``dst`` [n, k], in their latest ``depth`` events before."""
        made = PairHistory(*(torch.empty(dst.shape, dtype=torch.int64) for _ in range(3)))
        self._check_nodes(src)
        team = num_threads((dst.numel() + len(src) * 8) * _WORK)
        self._table.meetings(src.contiguous(), before.contiguous(), dst.contiguous(), depth, *made, team)
        return made

    def times_of(self, events: Tensor) -> Tensor:
        """Times of events, of any shape; of −1 the time of the first event, before which nothing is."""
        return self._t[events.clamp(min=0)]

    def _out(self, nodes: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self._check_nodes(nodes)
        shape = (nodes.shape[0], k)
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)

    def _check_nodes(self, nodes: Tensor) -> None:
        if nodes.numel() and int(nodes.max()) >= self._num_nodes:
            raise InputError(f"there are nodes 0 to {self._num_nodes - 1}, found {int(nodes.max())}")

    def _check_times(self, times: Tensor) -> None:
        if times.dtype != self._t.dtype:
            raise InputError(f"times of this stream are {self._t.dtype}, found {times.dtype}: convert one of them")
