"""Features of pairs read past events only, do not depend on offset or unit of time, and have their defined values."""

from __future__ import annotations

import torch

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.nn.temporal.decoders import NUM_FEATURES, PairFeatures
from tests.graphs import event_stream


def stream(shift: int = 0, unit: int = 1) -> EventStream:
    random = torch.Generator().manual_seed(0)
    src, dst = torch.randint(12, (2, 400), generator=random)
    return event_stream(src, dst, (torch.arange(400) // 3) * unit + shift, num_nodes=12)


def features(events: EventStream, numbers: torch.Tensor, *, visible: int, unit: float = 1.0) -> torch.Tensor:
    pairs = PairFeatures(events.temporal_neighbors(), events.src, unit)
    all_nodes = torch.arange(12).expand(len(numbers), -1)
    return pairs.of(events.src[numbers], all_nodes, events.t[numbers], visible=visible)


def test_later_events_and_those_of_the_same_time_do_not_matter() -> None:
    whole, numbers = stream(), torch.arange(300, 306)
    expected = features(whole, numbers, visible=400)
    assert expected.shape == (6, 12, NUM_FEATURES) and bool(torch.isfinite(expected).all())
    for row, number in enumerate(numbers.tolist()):
        past = int((whole.t < whole.t[number]).sum())
        assert torch.equal(features(whole, numbers[row : row + 1], visible=past)[0], expected[row])
    cut = features(whole.slice(0, 306), numbers, visible=306)
    assert torch.equal(cut, expected)
    assert not torch.equal(features(whole, numbers, visible=290), expected), "what is hidden is missed"


def test_neither_offset_nor_unit_of_time_matters() -> None:
    numbers = torch.arange(100, 400, 7)
    expected = features(stream(), numbers, visible=400)
    assert torch.equal(features(stream(shift=1_700_000_000), numbers, visible=400), expected)
    torch.testing.assert_close(features(stream(unit=1000), numbers, visible=400, unit=1000.0), expected)


def test_features_of_a_short_stream_have_their_defined_values() -> None:
    src, dst = torch.tensor([0, 0, 3, 0]), torch.tensor([1, 2, 0, 1])
    events = event_stream(src, dst, torch.tensor([1, 2, 3, 9]), num_nodes=5)
    pairs = PairFeatures(events.temporal_neighbors(), events.src, 1.0)
    values = pairs.of(torch.tensor([0]), torch.arange(5)[None], torch.tensor([9]), visible=4)[0]
    assert values[:, 0].tolist() == [0, 1, 1, 1, 0], "met"
    assert values[:, 5].tolist() == [0, 0, 0, 1, 0], "at the latest event"
    assert values[:, 7].tolist() == [0, 1, 1, 0, 0], "by an event of the source's"
    assert values[:, 3].tolist() == [0, *[float(torch.tensor(1 / 3))] * 3, 0], "share of the source's events"
    assert values[:, 8].tolist() == [1, 1, 1, 1, 0], "known at all"
