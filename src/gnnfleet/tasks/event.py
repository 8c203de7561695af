"""Tasks on event streams: prediction of events (temporal links) or of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.graph.events.event_stream import EventStream, NegativeSampler
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.link import LINK_LOSSES
from gnnfleet.nn.temporal.decoders import ClassDecoder, EventDecoder
from gnnfleet.nn.temporal.model import TemporalModel


@dataclass(frozen=True, eq=False)
class EventTask:
    """Prediction of the events of a stream: of their classes if ``head`` is set, else of links."""

    stream: EventStream
    parts: Mapping[str, EventStream]  # train, val, test
    target: str  # node type of destinations
    negatives: NegativeSampler  # of evaluations, drawn from all destinations
    num_negatives: int = 1  # of an event in training
    loss_name: str = "bce"
    metric_name: str = "auto"
    head: NodeHead | None = None

    @property
    def metric(self) -> str:
        if self.head is not None:
            return self.head.name
        return "mrr" if self.metric_name == "auto" else self.metric_name

    def items(self, split: str) -> Tensor:
        """[n] event numbers; only events with a label if classes are predicted."""
        part = self.parts[split]
        if self.head is None:
            return part.numbers
        assert part.y is not None
        return part.numbers[self.head.is_labelled(part.y)]

    @property
    def mean_gap(self) -> float:
        """Mean time between training events, over the middle 90 % so that an outlier has no effect.

        If the middle has a single time, the mean is over all events; if all events have the same time, 1 / count.
        """
        t = self.parts["train"].t
        trim = len(t) // 20
        if middle := float(t[-1 - trim] - t[trim]):
            return middle / (len(t) - 1 - 2 * trim)
        return (float(t[-1] - t[0]) or 1.0) / len(t)

    @property
    def span(self) -> float:
        """Time span of training: ``mean_gap`` times the number of events."""
        return self.mean_gap * len(self.parts["train"])

    def sample_negatives(self, numbers: Tensor, *, sweep: int, number: int = 0) -> Tensor:
        """[n, K] negatives of events in set ``number`` of a sweep."""
        if self.head is not None:
            return torch.empty(len(numbers), 0, dtype=torch.int64)
        positive = self.stream.dst[numbers]
        return self._training_sampler.for_training(
            numbers, positive, sweep=sweep, number=number, count=self.num_negatives
        )

    @cached_property
    def _training_sampler(self) -> NegativeSampler:
        """Sampler of the destinations of training events; later destinations are unknown in training."""
        return replace(self.negatives, destinations=torch.unique(self.parts["train"].dst))

    def loss(self, model: TemporalModel, z: Tensor, numbers: Tensor, pairs: Tensor | None = None) -> tuple[Tensor, int]:
        """Return (sum of losses, number of events counted) from embeddings of sources, destinations and negatives."""
        n = len(numbers)
        if self.head is not None:
            assert self.stream.y is not None and isinstance(model.decoder, ClassDecoder)
            y = self.stream.y[numbers]
            return self.head.loss(model.decoder(z[:n], z[n : 2 * n]), y), int(self.head.is_labelled(y).sum())
        positive, negative = link_scores(model, z, n, pairs)
        return LINK_LOSSES[self.loss_name](positive, negative), n


def link_scores(model: TemporalModel, z: Tensor, n: int, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """([n], [n, K]) logits from embeddings of sources, destinations and negatives."""
    decoder = model.decoder
    assert isinstance(decoder, EventDecoder)
    sources, others = decoder.sources(z[:n]), decoder.destinations(z[n:])
    # One call for all candidates: rounding must not separate an event from an equal candidate.
    candidates = torch.cat([others[:n, None], others[n:].view(n, -1, others.shape[1])], 1)
    logits = decoder.scores(sources[:, None], candidates, pairs)
    return logits[:, 0], logits[:, 1:]
