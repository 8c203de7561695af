"""EdgeBank, a baseline without weights: an event is likely if the same pair met before (Poursafaei et al., 2022).

Repeated events are easy to predict, so results on events are reported next to this baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import MAX_REJECTION_COUNT, AllDestinations, NegativeSampler
from gnnfleet.nn.ranking import ranks_in_own_list

# Window as a share of the duration of training, and events between updates of the bank; both as in TGB.
WINDOW, BATCH = 0.15, 200


class EdgeBank:
    """Scores of pairs: 1 if in the bank, else 0. The bank holds a prefix of the stream, extended by ``update``.

    With a ``window`` (in units of time) a pair counts if it met at most that long before the newest event.
    """

    def __init__(self, stream: EventStream, *, window: float | None = None) -> None:
        self._stream, self._window = stream, window
        # Pairs are ordered by (source, destination), so those of one source are contiguous.
        self._pairs, self._pair_of = torch.unique(stream.src * stream.num_nodes + stream.dst, return_inverse=True)
        self._last = torch.full((len(self._pairs),), -1)  # latest event of each pair, −1 for none
        self._num_events = self._oldest = 0

    def update(self, num_events: int) -> None:
        """Extend the bank to the first ``num_events`` events."""
        assert num_events >= self._num_events, "events cannot be removed"
        if num_events == self._num_events:
            return
        events = torch.arange(self._num_events, num_events)
        # Events are in the order of time, so the last event of a pair counts.
        self._last.scatter_reduce_(0, self._pair_of[self._num_events : num_events], events, "amax")
        self._num_events = num_events
        if self._window is not None:
            t = self._stream.t[:num_events]
            back = self._window if t.is_floating_point() else int(self._window)  # exact for integer times
            self._oldest = int(torch.searchsorted(t, t[-1:] - back))

    def score(self, src: Tensor, dst: Tensor) -> Tensor:
        """float32 scores of pairs; shapes of ``src`` and ``dst`` broadcast."""
        keys = src * self._stream.num_nodes + dst
        if not len(self._pairs):
            return torch.zeros(keys.shape)
        row = torch.searchsorted(self._pairs, keys.contiguous()).clamp_(max=len(self._pairs) - 1)
        in_bank: Tensor = (self._pairs[row] == keys) & (self._last[row] >= self._oldest)
        return in_bank.float()

    def score_all(self, src: Tensor, destinations: Tensor) -> Tensor:
        """[n, N] float32 scores of sources [n] with all [N] ascending destinations of the stream."""
        first, end = (torch.searchsorted(self._pairs, (src + step) * self._stream.num_nodes) for step in (0, 1))
        rows = torch.repeat_interleave(torch.arange(len(src)), end - first)
        pairs = torch.arange(len(rows)) + (end - (end - first).cumsum(0))[rows]
        in_bank = self._last[pairs] >= self._oldest
        scores = torch.zeros(len(src), len(destinations))
        scores[
            rows[in_bank], torch.searchsorted(destinations, self._pairs[pairs[in_bank]] % self._stream.num_nodes)
        ] = 1
        return scores


def edgebank_ranks(
    stream: EventStream,
    part: EventStream,
    *,
    window: float | None = None,
    negatives: NegativeSampler | AllDestinations,
    batch: int = BATCH,
    count: int = MAX_REJECTION_COUNT,
) -> Tensor:
    """[E] ranks of a part's events against a bank of all events before their batch; ties share the middle rank.

    A ``NegativeSampler`` draws ``count`` negatives for each event.
    """
    bank = EdgeBank(stream, window=window)
    ranks = []
    for lo in range(part.first, part.first + len(part), batch):
        hi = min(lo + batch, part.first + len(part))
        bank.update(lo)
        events = stream.slice(lo, hi)
        positive = bank.score(events.src, events.dst)
        if isinstance(negatives, AllDestinations):
            scores = bank.score_all(events.src, negatives.destinations)
            ranks.append(ranks_in_own_list(positive, scores, negatives.mask(lo, hi)))
        else:
            others = negatives.for_evaluation(events.numbers, events.dst, count=count)
            ranks.append(ranks_in_own_list(positive, bank.score(events.src[:, None], others)))
    return torch.cat(ranks) if ranks else torch.empty(0, dtype=torch.float64)


def time_window(training: EventStream) -> float:
    """Duration of the share ``WINDOW`` of the training events' time span."""
    return float(training.t[-1] - training.t[0]) * WINDOW if len(training) else 0.0
