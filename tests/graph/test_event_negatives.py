"""Negatives of events: others than the positive, each once, by key alone; the full rule of TGB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import AllDestinations, NegativeSampler

DESTINATIONS = torch.arange(40, 100, 3)


def test_never_the_positive_each_once_and_all_others_as_likely() -> None:
    draws = NegativeSampler(DESTINATIONS, seed=3)
    events = torch.arange(20_000)
    positive = DESTINATIONS[events % 20]
    found = draws.for_training(events, positive, sweep=1, count=3)
    assert bool(torch.isin(found, DESTINATIONS).all())
    assert not bool((found == positive[:, None]).any())
    assert not bool((found.sort(1).values.diff(dim=1) == 0).any())
    places = torch.searchsorted(DESTINATIONS, found) - torch.searchsorted(DESTINATIONS, positive)[:, None]
    seen = torch.bincount((places % 20).view(-1), minlength=20)
    mean = 60_000 / 19
    assert int(seen[0]) == 0 and float(((seen[1:] - mean) ** 2 / mean).sum()) < 50
    every = draws.for_evaluation(events[:500], positive[:500], count=19)
    expected = torch.stack([DESTINATIONS[own != DESTINATIONS] for own in positive[:500]])
    assert torch.equal(every.sort(1).values, expected)


def test_the_one_negative_of_an_event_is_as_likely_to_be_any_other() -> None:
    draws, events, own = NegativeSampler(DESTINATIONS, seed=3), torch.arange(20_000), 7
    positive = torch.full((20_000,), int(DESTINATIONS[own]))

    def unevenness(found: Tensor) -> float:
        seen = torch.bincount(torch.searchsorted(DESTINATIONS, found), minlength=20).double()
        mean = 20_000 / 19
        assert seen[own] == 0
        return float(((seen - mean) ** 2 / mean).sum()) - mean  # without the place of its own

    for count in (1, 3, 19):
        every, column = draws.for_evaluation(events, positive, count=count), draws.one_of(events, count)
        assert unevenness(every.gather(1, column[:, None])[:, 0]) < 50
        part = torch.arange(500, 600)
        assert torch.equal(draws.one_of(part, count), column[part]), "it goes by the event"
    assert unevenness(draws.for_evaluation(events, positive, count=3)[:, 0].contiguous()) > 1000, "a column is not even"


def test_a_new_destination_has_all_as_negatives() -> None:
    found = NegativeSampler(DESTINATIONS).for_training(torch.arange(2_000), torch.full((2_000,), 41), sweep=0)
    assert set(found.view(-1).tolist()) == set(DESTINATIONS.tolist())


def test_draws_go_by_event_sweep_and_set_not_by_batch() -> None:
    draws = NegativeSampler(DESTINATIONS, seed=3)
    events, positive = torch.arange(300), DESTINATIONS[torch.arange(300) % 20]
    whole = draws.for_training(events, positive, sweep=2, number=1, count=2)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    pieces = [draws.for_training(events[rows], positive[rows], sweep=2, number=1, count=2) for rows in order.split(7)]
    assert torch.equal(torch.cat(pieces), whole[order])
    others = [
        draws.for_training(events, positive, sweep=2, number=0, count=2),
        draws.for_training(events, positive, sweep=1, number=1, count=2),
        NegativeSampler(DESTINATIONS, seed=4).for_training(events, positive, sweep=2, number=1, count=2),
        draws.for_evaluation(events, positive, count=2),
    ]
    assert not any(torch.equal(other, whole) for other in others)


def test_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 negatives need 21"):
        NegativeSampler(DESTINATIONS).for_evaluation(torch.arange(2), DESTINATIONS[:2], count=20)


def test_the_full_rule_leaves_out_positives_of_the_same_source_and_time() -> None:
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(4, (300,), generator=random), torch.randint(4, 12, (300,), generator=random)
    stream = EventStream.from_arrays(src, dst, torch.arange(300) // 6)
    rule = AllDestinations(stream)
    for lo, hi in ((0, 10), (10, 11), (11, 300)):
        mask = rule.mask(lo, hi)
        for row, event in enumerate(range(lo, hi)):
            same = [e for e in range(300) if src[e] == src[event] and e // 6 == event // 6]
            out = {int(dst[e]) for e in same}
            assert {
                d for d, kept in zip(rule.destinations.tolist(), mask[row].tolist(), strict=True) if not kept
            } == out
        assert torch.equal(rule.destinations[rule.positives(lo, hi)], dst[lo:hi])
