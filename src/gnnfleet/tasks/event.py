"""What is learnt from events: whether there is one, or of which class it is. And what a strategy is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import NegativeSampler
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.link import link_loss, softmax_loss
from gnnfleet.nn.temporal.decoders import ClassDecoder, EventDecoder
from gnnfleet.nn.temporal.model import TemporalModel


@dataclass(frozen=True, eq=False)
class EventTask:
    """Events of a stream as things to predict. ``head`` is there where their classes are, else links are predicted."""

    stream: EventStream
    parts: Mapping[str, EventStream]  # train, val, test
    target: str  # the node type of destinations
    negatives: NegativeSampler  # of evaluations, from all destinations
    count: int = 1  # negatives of an event in training
    loss_name: str = "bce"
    metric_name: str = "auto"
    head: NodeHead | None = None

    @property
    def metric(self) -> str:
        if self.head is not None:
            return self.head.name
        return "mrr" if self.metric_name == "auto" else self.metric_name

    def items(self, split: str) -> Tensor:
        """[n] numbers of events; those with a label, where labels are predicted."""
        part = self.parts[split]
        if self.head is None:
            return part.numbers
        assert part.y is not None
        return part.numbers[self.head.is_labelled(part.y)]

    @property
    def mean_gap(self) -> float:
        """Time between events of training, on average over the middle nine tenths: a stray time decides nothing. Over
        all where these are at once; any where all are."""
        t = self.parts["train"].t
        cut = len(t) // 20
        if middle := float(t[-1 - cut] - t[cut]):
            return middle / (len(t) - 1 - 2 * cut)
        return (float(t[-1] - t[0]) or 1.0) / len(t)

    @property
    def span(self) -> float:
        """Time that training takes at this pace."""
        return self.mean_gap * len(self.parts["train"])

    def sample_negatives(self, low: int, high: int, *, sweep: int, number: int = 0) -> Tensor:
        """[n, K] negatives of events in set ``number`` of a sweep."""
        return self.negatives_of(torch.arange(low, high), sweep=sweep, number=number)

    def negatives_of(self, numbers: Tensor, *, sweep: int, number: int = 0) -> Tensor:
        """The same for any events."""
        if self.head is not None:
            return torch.empty(len(numbers), 0, dtype=torch.int64)
        positive = self.stream.dst[numbers]
        return self._trained_on.for_training(numbers, positive, sweep=sweep, number=number, count=self.count)

    @cached_property
    def _trained_on(self) -> NegativeSampler:
        """From the destinations of training events: that others are there at all is not known yet."""
        return replace(self.negatives, destinations=torch.unique(self.parts["train"].dst))

    def loss(
        self, model: TemporalModel, z: Tensor, low: int, high: int, pairs: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """(the sum over events, how many count) from embeddings of sources, destinations and negatives."""
        return self.loss_of(model, z, torch.arange(low, high), pairs)

    def loss_of(
        self, model: TemporalModel, z: Tensor, numbers: Tensor, pairs: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """The same for any events."""
        n = len(numbers)
        if self.head is not None:
            assert self.stream.y is not None and isinstance(model.decoder, ClassDecoder)
            y = self.stream.y[numbers]
            return self.head.loss(model.decoder(z[:n], z[n : 2 * n]), y), int(self.head.is_labelled(y).sum())
        positive, negative = link_scores(model, z, n, pairs)
        return (softmax_loss if self.loss_name == "softmax" else link_loss)(positive, negative), n


def link_scores(model: TemporalModel, z: Tensor, n: int, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """([n], [n, K]) logits from embeddings of sources, destinations and negatives."""
    decoder = model.decoder
    assert isinstance(decoder, EventDecoder)
    sources, others = decoder.sources(z[:n]), decoder.destinations(z[n:])
    # In one call, so that an event and a candidate that is its equal are not told apart by how they are rounded.
    each = torch.cat([others[:n, None], others[n:].view(n, -1, others.shape[1])], 1)
    logits = decoder.scores(sources[:, None], each, pairs)
    return logits[:, 0], logits[:, 1:]
