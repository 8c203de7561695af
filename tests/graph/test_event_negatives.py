"""Negatives of events: distinct, never the positive, keyed by event; the full rule of TGB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import AllDestinations, NegativeSampler
from tests.graphs import event_stream

DESTINATIONS = torch.arange(40, 100, 3)


def test_negatives_are_distinct_uniform_and_never_the_positive() -> None:
    sampler = NegativeSampler(DESTINATIONS, seed=3)
    events = torch.arange(20_000)
    positive = DESTINATIONS[events % 20]
    negatives = sampler.for_training(events, positive, sweep=1, count=3)
    assert bool(torch.isin(negatives, DESTINATIONS).all())
    assert not bool((negatives == positive[:, None]).any())
    assert not bool((negatives.sort(1).values.diff(dim=1) == 0).any())
    shifts = torch.searchsorted(DESTINATIONS, negatives) - torch.searchsorted(DESTINATIONS, positive)[:, None]
    counts = torch.bincount((shifts % 20).view(-1), minlength=20)
    mean = 60_000 / 19
    assert int(counts[0]) == 0 and float(((counts[1:] - mean) ** 2 / mean).sum()) < 50
    all_others = sampler.for_evaluation(events[:500], positive[:500], count=19)
    expected = torch.stack([DESTINATIONS[true != DESTINATIONS] for true in positive[:500]])
    assert torch.equal(all_others.sort(1).values, expected)


def test_the_single_negative_of_an_event_is_uniform() -> None:
    sampler, events, true = NegativeSampler(DESTINATIONS, seed=3), torch.arange(20_000), 7
    positive = torch.full((20_000,), int(DESTINATIONS[true]))

    def chi_squared(negatives: Tensor) -> float:
        counts = torch.bincount(torch.searchsorted(DESTINATIONS, negatives), minlength=20).double()
        mean = 20_000 / 19
        assert counts[true] == 0
        return float(((counts - mean) ** 2 / mean).sum()) - mean  # without the positive

    for count in (1, 3, 19):
        negatives, column = sampler.for_evaluation(events, positive, count=count), sampler.single_column(events, count)
        assert chi_squared(negatives.gather(1, column[:, None])[:, 0]) < 50
        part = torch.arange(500, 600)
        assert torch.equal(sampler.single_column(part, count), column[part]), "it is keyed by the event"
    first_column = sampler.for_evaluation(events, positive, count=3)[:, 0].contiguous()
    assert chi_squared(first_column) > 1000, "a column is not uniform"


def test_for_a_new_destination_all_others_are_negatives() -> None:
    negatives = NegativeSampler(DESTINATIONS).for_training(torch.arange(2_000), torch.full((2_000,), 41), sweep=0)
    assert set(negatives.view(-1).tolist()) == set(DESTINATIONS.tolist())


def test_draws_are_keyed_by_event_sweep_and_set_not_by_batch() -> None:
    sampler = NegativeSampler(DESTINATIONS, seed=3)
    events, positive = torch.arange(300), DESTINATIONS[torch.arange(300) % 20]
    negatives = sampler.for_training(events, positive, sweep=2, number=1, count=2)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    pieces = [sampler.for_training(events[rows], positive[rows], sweep=2, number=1, count=2) for rows in order.split(7)]
    assert torch.equal(torch.cat(pieces), negatives[order])
    others = [
        sampler.for_training(events, positive, sweep=2, number=0, count=2),
        sampler.for_training(events, positive, sweep=1, number=1, count=2),
        NegativeSampler(DESTINATIONS, seed=4).for_training(events, positive, sweep=2, number=1, count=2),
        sampler.for_evaluation(events, positive, count=2),
    ]
    assert not any(torch.equal(other, negatives) for other in others)


def test_more_negatives_than_destinations_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 negatives need 21"):
        NegativeSampler(DESTINATIONS).for_evaluation(torch.arange(2), DESTINATIONS[:2], count=20)


def test_the_full_rule_excludes_positives_of_the_same_source_and_time() -> None:
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(4, (300,), generator=random), torch.randint(4, 12, (300,), generator=random)
    stream = event_stream(src, dst, torch.arange(300) // 6)
    rule = AllDestinations(stream)
    for lo, hi in ((0, 10), (10, 11), (11, 300)):
        mask = rule.mask(lo, hi)
        for row, event in enumerate(range(lo, hi)):
            same = [e for e in range(300) if src[e] == src[event] and e // 6 == event // 6]
            assert set(rule.destinations[~mask[row]].tolist()) == {int(dst[e]) for e in same}
