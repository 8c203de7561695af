"""Ranks of true links among others, and what is made of them: MRR and Hits@K; average precision.

Ties share the middle of their places: rank = 1 + (number above) + (number equal) / 2. A model that scores everything
alike is thus in the middle, not first. P positives, K negatives, Q queries, N candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def ranks_in_own_list(positive: Tensor, negative: Tensor, mask: Tensor | None = None) -> Tensor:
    """[P] float64 ranks of scores [P] among their own negatives [P, K], those that ``mask`` [P, K] names if given."""
    # Counted from below, so that a score that is no number comes last.
    not_above, equal = negative <= positive[:, None], negative == positive[:, None]
    if mask is None:
        above = negative.shape[1] - not_above.sum(1)
    else:
        above, equal = (mask & ~not_above).sum(1), mask & equal
    return 1 + above.double() + equal.sum(1).double() / 2


def ranks_in_shared_list(positive: Tensor, negative: Tensor) -> Tensor:
    """[P] float64 ranks of scores [P] among one list of negatives [K]."""
    listed = negative.sort().values
    not_above = torch.searchsorted(listed, positive, right=True)
    equal = not_above - torch.searchsorted(listed, positive)
    ranks = 1 + (len(listed) - not_above).double() + equal.double() / 2
    return torch.where(positive.isnan(), 1.0 + len(listed), ranks)


def mrr(ranks: Tensor) -> float:
    """The mean of 1 / rank; nan without ranks."""
    return float(ranks.double().reciprocal().mean())


def hits_at_k(ranks: Tensor, k: int) -> float:
    """The share of ranks that are at most ``k``; nan without ranks."""
    return float((ranks <= k).double().mean())


def ogb_hits_at_k(positive: Tensor, negative: Tensor, k: int) -> float:
    """OGB's Hits@K: the share of positives above the K-th best of one list of negatives; 1 for a shorter list."""
    if len(negative) < k:
        return 1.0
    return float((positive > negative.topk(k).values[-1]).double().mean())


def average_precision(positive: Tensor, negative: Tensor) -> float:
    """Over all scores of positives and of negatives, pooled; equal scores count together. nan without positives."""
    scores = torch.cat([positive.reshape(-1), negative.reshape(-1)]).double()
    true = torch.zeros(len(scores), dtype=torch.float64)
    true[: positive.numel()] = 1
    order = scores.argsort(descending=True)
    ends = torch.ones(len(scores), dtype=torch.bool)
    ends[:-1] = scores[order].diff() != 0
    found = true[order].cumsum(0)[ends]
    precision = found / (torch.arange(len(scores))[ends] + 1)
    return float((found.diff(prepend=found.new_zeros(1)) * precision).sum() / positive.numel())


@dataclass(frozen=True, eq=False)
class KnownTriples:
    """What is known to be true: query ``asked[i]`` has the answers ``answer[start[i]:start[i + 1]]``."""

    queries: Tensor  # [A] int64 ascending, each once
    start: Tensor  # [A + 1]
    answers: Tensor  # [n]

    @classmethod
    def of(cls, asked: Tensor, answer: Tensor) -> KnownTriples:
        """From pairs of a query's number and one true candidate, in any order; repeats do no harm."""
        order = torch.argsort(asked)
        names, sizes = torch.unique_consecutive(asked[order], return_counts=True)
        start = torch.zeros(len(names) + 1, dtype=torch.int64)
        start[1:] = sizes.cumsum(0)
        return cls(names, start, answer[order])

    def of_queries(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """(place in ``queries``, true candidate) for all that is known of them."""
        if not len(self.queries):
            return queries[:0], queries[:0]
        place = torch.searchsorted(self.queries, queries).clamp_(max=len(self.queries) - 1)
        known = self.queries[place] == queries
        sizes = torch.where(known, self.start[place + 1] - self.start[place], 0)
        rows = torch.repeat_interleave(torch.arange(len(queries)), sizes)
        first = sizes.cumsum(0) - sizes
        within = torch.arange(len(rows)) - first[rows]
        return rows, self.answers[self.start[place][rows] + within]


def filtered_ranks(
    score: Callable[[Tensor], Tensor], queries: Tensor, truth: Tensor, known: KnownTriples, *, chunk: int
) -> Tensor:
    """[Q] float64: the rank of ``truth`` [Q] among all candidates, other known answers left out.

    ``score(rows)`` gives [n, N] scores of queries ``rows``; ``chunk`` queries are scored at a time, so no more than
    ``chunk`` · N scores are in memory. ``queries`` [Q] are their numbers in ``known``.
    """
    ranks = torch.empty(len(queries), dtype=torch.float64)
    for low in range(0, len(queries), chunk):
        rows = torch.arange(low, min(low + chunk, len(queries)))
        scores = score(rows)
        own = scores.gather(1, truth[rows][:, None])
        scores[known.of_queries(queries[rows])] = -torch.inf
        above = scores.shape[1] - (scores <= own).sum(1)
        equal = (scores == own).sum(1) - (scores.gather(1, truth[rows][:, None]) == own)[:, 0].long()
        ranks[rows] = 1 + above.double() + equal.double() / 2
    return ranks
