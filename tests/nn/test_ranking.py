"""Ranks equal explicit counts; metrics equal those of OGB."""

from __future__ import annotations

import math

import pytest
import torch

from gnnfleet.nn.ranking import (
    KnownTriples,
    average_precision,
    filtered_ranks,
    hits_at_k,
    mrr,
    ogb_hits_at_k,
    ranks_in_own_list,
    ranks_in_shared_list,
)


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    """Coarse scores, so that there are ties."""
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(seed)).float() / 4


def rank(score: float, others: list[float]) -> float:
    return 1 + sum(o > score for o in others) + sum(o == score for o in others) / 2


def test_ranks_among_negatives_per_positive_equal_counts() -> None:
    positive, negative = scores(40), scores(40, 9, seed=1)
    expected = [rank(p, row) for p, row in zip(positive.tolist(), negative.tolist(), strict=True)]
    assert ranks_in_own_list(positive, negative).tolist() == expected
    assert mrr(torch.tensor(expected)) == pytest.approx(sum(1 / r for r in expected) / 40)
    assert hits_at_k(torch.tensor(expected), 3) == sum(r <= 3 for r in expected) / 40


def test_mrr_equals_that_of_ogb() -> None:
    """ogb: rank = (optimistic + pessimistic) / 2, of which 0.5 · (greater + greater or equal) + 1."""
    positive, negative = scores(40), scores(40, 9, seed=1)
    optimistic = (negative > positive[:, None]).sum(1)
    pessimistic = (negative >= positive[:, None]).sum(1)
    theirs = 0.5 * (optimistic + pessimistic) + 1
    assert mrr(ranks_in_own_list(positive, negative)) == pytest.approx(float((1 / theirs).mean()))


@pytest.mark.parametrize("k", [1, 5, 20, 200])
def test_hits_equal_those_of_ogb(k: int) -> None:
    positive, negative = scores(50), scores(100, seed=1)
    if k > 100:
        assert ogb_hits_at_k(positive, negative, k) == 1.0
        return
    bar = sorted(negative.tolist(), reverse=True)[k - 1]
    assert ogb_hits_at_k(positive, negative, k) == pytest.approx(sum(p > bar for p in positive.tolist()) / 50)


def test_one_list_for_all_equals_the_same_list_for_each() -> None:
    positive, negative = scores(50), scores(100, seed=1)
    assert ranks_in_shared_list(positive, negative).tolist() == [rank(p, negative.tolist()) for p in positive.tolist()]


def test_nan_scores_rank_last() -> None:
    nan = torch.tensor([math.nan])
    assert ranks_in_own_list(nan, torch.zeros(1, 4)).item() == 5
    assert ranks_in_shared_list(nan, torch.zeros(4)).item() == 5
    none = KnownTriples.of(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    zero = torch.zeros(1, dtype=torch.int64)
    assert filtered_ranks(lambda i: nan.expand(1, 4).clone(), zero, zero, none, chunk=1).item() == 5


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_filtered_ranks_leave_out_known_answers(chunk: int) -> None:
    table, queries = scores(30, 15), torch.randint(0, 6, (30,), generator=torch.Generator().manual_seed(5))
    random = torch.Generator().manual_seed(2)
    truth = torch.randint(0, 15, (30,), generator=random)
    known_queries, known_answers = (
        torch.randint(0, 8, (40,), generator=random),
        torch.randint(0, 15, (40,), generator=random),
    )
    known_queries, known_answers = (
        torch.cat([known_queries, queries[::2]]),
        torch.cat([known_answers, truth[::2]]),
    )  # some truths are not known
    expected = []
    for i, (q, t) in enumerate(zip(queries.tolist(), truth.tolist(), strict=True)):
        true = {b for a, b in zip(known_queries.tolist(), known_answers.tolist(), strict=True) if a == q}
        row = table[i].tolist()
        expected.append(rank(row[t], [s for c, s in enumerate(row) if c != t and c not in true]))
    ranks = filtered_ranks(
        lambda i: table[i].clone(), queries, truth, KnownTriples.of(known_queries, known_answers), chunk=chunk
    )
    assert ranks.tolist() == expected


def test_masked_negatives_do_not_count() -> None:
    random = torch.Generator().manual_seed(0)
    positive, negative = torch.randint(5, (30,), generator=random), torch.randint(5, (30, 9), generator=random)
    mask = torch.rand(30, 9, generator=random) < 0.6
    expected = [ranks_in_own_list(p[None], n[m][None]) for p, n, m in zip(positive, negative, mask, strict=True)]
    assert torch.equal(ranks_in_own_list(positive, negative, mask), torch.cat(expected))


def test_average_precision_over_thresholds() -> None:
    random = torch.Generator().manual_seed(0)
    for levels in (1, 3, 50, 10**6):  # nothing but ties, many, few and none
        positive, negative = (
            torch.randint(levels, (40,), generator=random),
            torch.randint(levels, (90,), generator=random),
        )
        expected, last = 0.0, 0
        for threshold in sorted({*positive.tolist(), *negative.tolist()}, reverse=True):
            true_positives, false_positives = int((positive >= threshold).sum()), int((negative >= threshold).sum())
            expected += (true_positives - last) / 40 * true_positives / (true_positives + false_positives)
            last = true_positives
        assert average_precision(positive, negative) == pytest.approx(expected, rel=1e-12)
