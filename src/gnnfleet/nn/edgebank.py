"""EdgeBank, the baseline without weights: an event is likely if the same pair met before (Poursafaei et al., 2022).

What is repeated often looks learnt; no result on events says much without this beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import MAX_REJECTION_COUNT, AllDestinations, NegativeSampler
from gnnfleet.nn.ranking import ranks_in_own_list

# The window's share of the duration of training, and events after which the bank is updated, as TGB has them.
WINDOW, BATCH = 0.15, 200


class EdgeBank:
    """Scores 1 for pairs in the bank, else 0. The bank has the first events of a stream, as many as it was shown.

    With a ``window`` (in the units of time) a pair counts if it met no longer than that before the newest event.
    """

    def __init__(self, stream: EventStream, *, window: float | None = None) -> None:
        self._stream, self._window = stream, window
        # Pairs are numbered by (source, destination); what a source met lies together.
        self._pairs, self._pair_of = torch.unique(stream.src * stream.num_nodes + stream.dst, return_inverse=True)
        self._last = torch.full((len(self._pairs),), -1)  # the number of the latest event seen, −1 for none
        self._seen = self._oldest = 0

    def update(self, seen: int) -> None:
        """The first ``seen`` events are known now."""
        assert seen >= self._seen, "what was seen stays so"
        if seen == self._seen:
            return
        events = torch.arange(self._seen, seen)
        # Times never fall, so of several events of a pair the last one counts.
        self._last.scatter_reduce_(0, self._pair_of[self._seen : seen], events, "amax")
        self._seen = seen
        if self._window is not None:
            t = self._stream.t[:seen]
            back = self._window if t.is_floating_point() else int(self._window)  # whole times: the same, exactly
            self._oldest = int(torch.searchsorted(t, t[-1:] - back))

    def score(self, src: Tensor, dst: Tensor) -> Tensor:
        """float32 scores of pairs; shapes of ``src`` and ``dst`` broadcast."""
        keys = src * self._stream.num_nodes + dst
        if not len(self._pairs):
            return torch.zeros(keys.shape)
        place = torch.searchsorted(self._pairs, keys.contiguous()).clamp_(max=len(self._pairs) - 1)
        known: Tensor = (self._pairs[place] == keys) & (self._last[place] >= self._oldest)
        return known.float()

    def score_all(self, src: Tensor, destinations: Tensor) -> Tensor:
        """[n, N] float32 scores of sources [n] with each of [N] ascending destinations, all that the stream has."""
        first, end = (torch.searchsorted(self._pairs, (src + step) * self._stream.num_nodes) for step in (0, 1))
        rows = torch.repeat_interleave(torch.arange(len(src)), end - first)
        pairs = torch.arange(len(rows)) + (end - (end - first).cumsum(0))[rows]
        known = self._last[pairs] >= self._oldest
        scores = torch.zeros(len(src), len(destinations))
        scores[rows[known], torch.searchsorted(destinations, self._pairs[pairs[known]] % self._stream.num_nodes)] = 1
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
    """[E] ranks of a part's events: the bank has all events before their batch, and ties share the middle.

    Where negatives are drawn, ``count`` of them.
    """
    bank = EdgeBank(stream, window=window)
    ranks = []
    for lo in range(part.first, part.first + len(part), batch):
        hi = min(lo + batch, part.first + len(part))
        bank.update(lo)
        events = stream.slice(lo, hi)
        positive = bank.score(events.src, events.dst)
        if isinstance(negatives, AllDestinations):
            among = bank.score_all(events.src, negatives.destinations)
            ranks.append(ranks_in_own_list(positive, among, negatives.mask(lo, hi)))
        else:
            others = negatives.for_evaluation(events.numbers, events.dst, count=count)
            ranks.append(ranks_in_own_list(positive, bank.score(events.src[:, None], others)))
    return torch.cat(ranks) if ranks else torch.empty(0, dtype=torch.float64)


def time_window(training: EventStream, share: float = WINDOW) -> float:
    """A share of the time that training lasts."""
    return float(training.t[-1] - training.t[0]) * share if len(training) else 0.0
