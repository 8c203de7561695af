"""Ranking metrics of links: ranks among candidates, MRR, Hits@K, average precision; the baseline EdgeBank.

Ties share the middle rank: rank = 1 + (number above) + (number equal) / 2. A model with constant scores is thus in the
middle, not first. P positives, K negatives, Q queries, N candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import MAX_REJECTION_COUNT, AllDestinations, EventStream, NegativeSampler


def ranks_in_own_list(positive: Tensor, negative: Tensor, mask: Tensor | None = None) -> Tensor:
    """[P] float64 ranks of scores [P] among their own negatives [P, K], or only those in ``mask`` [P, K]."""
    # Counted from below, so that a nan score ranks last.
    not_above, equal = negative <= positive[:, None], negative == positive[:, None]
    if mask is None:
        above = negative.shape[1] - not_above.sum(1)
    else:
        above, equal = (mask & ~not_above).sum(1), mask & equal
    return 1 + above.double() + equal.sum(1).double() / 2


def ranks_in_shared_list(positive: Tensor, negative: Tensor) -> Tensor:
    """[P] float64 ranks of scores [P] among one list of negatives [K]."""
    ascending = negative.sort().values
    not_above = torch.searchsorted(ascending, positive, right=True)
    equal = not_above - torch.searchsorted(ascending, positive)
    ranks = 1 + (len(ascending) - not_above).double() + equal.double() / 2
    return torch.where(positive.isnan(), 1.0 + len(ascending), ranks)


def mrr(ranks: Tensor) -> float:
    """Mean of 1 / rank; nan without ranks."""
    return float(ranks.double().reciprocal().mean())


def hits_at_k(ranks: Tensor, k: int) -> float:
    """Share of ranks that are at most ``k``; nan without ranks."""
    return float((ranks <= k).double().mean())


def ogb_hits_at_k(positive: Tensor, negative: Tensor, k: int) -> float:
    """OGB's Hits@K: share of positives above the K-th best of one list of negatives; 1 for a shorter list."""
    if len(negative) < k:
        return 1.0
    return float((positive > negative.topk(k).values[-1]).double().mean())


def average_precision(positive: Tensor, negative: Tensor) -> float:
    """Average precision over the pooled scores; equal scores share a threshold. nan without positives."""
    scores = torch.cat([positive.reshape(-1), negative.reshape(-1)]).double()
    is_positive = torch.zeros(len(scores), dtype=torch.float64)
    is_positive[: positive.numel()] = 1
    order = scores.argsort(descending=True)
    ends = torch.ones(len(scores), dtype=torch.bool)
    ends[:-1] = scores[order].diff() != 0
    true_positives = is_positive[order].cumsum(0)[ends]
    precision = true_positives / (torch.arange(len(scores))[ends] + 1)
    return float((true_positives.diff(prepend=true_positives.new_zeros(1)) * precision).sum() / positive.numel())


@dataclass(frozen=True, eq=False)
class KnownTriples:
    """Known true answers: query ``queries[i]`` has the answers ``answers[start[i]:start[i + 1]]``."""

    queries: Tensor  # [A] int64 ascending, each once
    start: Tensor  # [A + 1]
    answers: Tensor  # [n]

    @classmethod
    def of(cls, queries: Tensor, answers: Tensor) -> KnownTriples:
        """Group pairs of a query number and a true candidate, in any order; repeats are allowed."""
        order = torch.argsort(queries)
        distinct, sizes = torch.unique_consecutive(queries[order], return_counts=True)
        start = torch.zeros(len(distinct) + 1, dtype=torch.int64)
        start[1:] = sizes.cumsum(0)
        return cls(distinct, start, answers[order])

    def of_queries(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return (index into ``queries``, true candidate) of all known answers to them."""
        if not len(self.queries):
            return queries[:0], queries[:0]
        group = torch.searchsorted(self.queries, queries).clamp_(max=len(self.queries) - 1)
        has_answers = self.queries[group] == queries
        sizes = torch.where(has_answers, self.start[group + 1] - self.start[group], 0)
        rows = torch.repeat_interleave(torch.arange(len(queries)), sizes)
        first = sizes.cumsum(0) - sizes
        within = torch.arange(len(rows)) - first[rows]
        return rows, self.answers[self.start[group][rows] + within]


def filtered_ranks(
    score: Callable[[Tensor], Tensor], queries: Tensor, truth: Tensor, known: KnownTriples, *, chunk: int
) -> Tensor:
    """[Q] float64 ranks of ``truth`` [Q] among all candidates except other known answers.

    ``score(rows)`` returns [n, N] scores of queries ``rows``; ``chunk`` queries are scored at a time, so at most
    ``chunk`` · N scores are in memory. ``queries`` [Q] are their numbers in ``known``.
    """
    ranks = torch.empty(len(queries), dtype=torch.float64)
    for low in range(0, len(queries), chunk):
        rows = torch.arange(low, min(low + chunk, len(queries)))
        scores = score(rows)
        true_scores = scores.gather(1, truth[rows][:, None])
        scores[known.of_queries(queries[rows])] = -torch.inf
        ties_with_itself = (scores.gather(1, truth[rows][:, None]) == true_scores)[:, 0]
        ranks[rows] = ranks_in_own_list(true_scores[:, 0], scores) - ties_with_itself.double() / 2
    return ranks


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
