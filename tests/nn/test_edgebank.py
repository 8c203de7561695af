"""EdgeBank: equal to a dictionary, to TGB's published figures, and ranks that a constant scorer cannot win."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gnnfleet.graph.events.event_stream import AllDestinations, EventStream, NegativeSampler
from gnnfleet.nn.ranking import EdgeBank, edgebank_ranks, mrr, ranks_in_own_list, time_window
from tests.graphs import event_stream


@pytest.mark.parametrize("window", [None, 7.5, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_bank_equals_a_dictionary(window: float | None, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(6, (2, 200), generator=random)
    t = torch.randint(0, 3, (200,), generator=random).cumsum(0).to(dtype) + 2**40
    stream = event_stream(src, dst, t, num_nodes=8)
    bank = EdgeBank(stream, window=window)
    last: dict[tuple[int, int], float] = {}
    for seen in range(0, 201, 20):
        bank.update(seen)
        last |= {(int(src[e]), int(dst[e])): float(t[e]) for e in range(seen)}
        now = float(t[seen - 1]) if seen else 0.0
        expected = {pair for pair, when in last.items() if window is None or now - when <= window}
        scores = bank.score(torch.arange(8)[:, None], torch.arange(8))
        assert {tuple(pair) for pair in scores.nonzero().tolist()} == expected
        assert torch.equal(bank.score_all(torch.arange(8), torch.arange(8)), scores)


def wikipedia(folder: Path) -> EventStream:
    src, dst, t = torch.from_numpy(np.loadtxt(folder / "temporal" / "ml_wikipedia.txt", dtype=np.int64)).T.contiguous()
    return event_stream(src - 1, dst - 1, t)


def test_wikipedia_scores_equal_the_published_ones(shared_data: Path) -> None:
    """Unlimited and with a window of 15 % of training, val and test: all other destinations, batches of 200."""
    stream = wikipedia(shared_data)
    train, val, test = stream.split()
    rule = AllDestinations(stream)
    measured = [
        round(mrr(edgebank_ranks(stream, part, window=window, negatives=rule)), 4)
        for window in (None, time_window(train))
        for part in (val, test)
    ]
    assert measured == [0.5267, 0.4947, 0.5997, 0.5710]


def test_drawn_negatives_are_easier_and_the_same_every_time(shared_data: Path) -> None:
    stream = wikipedia(shared_data)
    test = stream.split()[2].slice(0, 2_000)
    few = [edgebank_ranks(stream, test, negatives=NegativeSampler(stream.destinations, seed=5)) for _ in range(2)]
    assert torch.equal(*few)
    assert mrr(few[0]) > mrr(edgebank_ranks(stream, test, negatives=AllDestinations(stream)))


@pytest.mark.parametrize("count", [1, 49, 999])
def test_a_constant_scorer_is_in_the_middle(count: int) -> None:
    ranks = ranks_in_own_list(torch.zeros(5), torch.zeros(5, count))
    assert mrr(ranks) == pytest.approx(2 / (count + 2), rel=1e-12)
