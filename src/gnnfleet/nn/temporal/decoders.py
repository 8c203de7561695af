"""Decoders of pairs of embeddings: the logit of an event, or logits of its classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.ops.rounded_matmul import linear_float32
from gnnfleet.ops.temporal_neighbors import TemporalNeighbors

HISTORY_DEPTH = 1024
"""Number of latest events of a source that are searched for meetings with the destination."""
NUM_FEATURES = 12


@dataclass(frozen=True, eq=False)
class PairFeatures:
    """Features of pairs from the event history. ``unit`` of times is, for example, the mean time between events."""

    recent: TemporalNeighbors
    sources: Tensor  # [E] int64 of all events
    unit: float

    def of(self, src: Tensor, dst: Tensor, times: Tensor, *, visible: int) -> Tensor:
        """[n, K, NUM_FEATURES] float32 of sources [n] at times [n] with ``dst`` [n, K], events before ``visible``."""
        before = self.recent.count_before(times, visible=visible)
        history = self.recent.pair_history(src, dst, before, depth=HISTORY_DEPTH)
        has_met, times = history.number > 0, times[:, None]
        num_events = self.recent.counts(src, before).clamp(max=HISTORY_DEPTH)[:, None]
        source_began = has_met & (self.sources[history.last.clamp(min=0)] == src[:, None])
        pair = [
            has_met,
            _log_scale(history.number, 3),
            _log_scale(self._time_since(times, history.last), 10),
            history.number / num_events.clamp(min=1),
            _log_scale(history.gap, 4),
            history.gap == 1,
            has_met * torch.exp(history.gap / -3),
            source_began,
        ]
        return torch.stack([part.float() for part in (*pair, *self._of_destinations(dst, times, before))], 2)

    def _of_destinations(self, dst: Tensor, times: Tensor, before: Tensor) -> list[Tensor]:
        """Long-term and recent activity of destinations."""
        event_count = before.repeat_interleave(dst.shape[1])
        count = self.recent.counts(dst.flatten(), event_count).view(dst.shape)
        query_time = times.expand(dst.shape).flatten()
        last = self.recent.latest(dst.flatten(), query_time, 1, visible=event_count)[1].view(dst.shape)
        events_since = torch.where(last >= 0, before[:, None] - last, 0)
        return [
            count > 0,
            _log_scale(count, 5),
            _log_scale(self._time_since(times, last), 10),
            _log_scale(events_since, 10),
        ]

    def _time_since(self, times: Tensor, events: Tensor) -> Tensor:
        """Time since events, in units; 0 without an event."""
        return torch.where(events >= 0, times - self.recent.times_of(events), 0) / self.unit


def _log_scale(value: Tensor, scale: float) -> Tensor:
    """Compress values of many magnitudes to a range of about 1."""
    return torch.log1p(value.float()) / scale


class EventDecoder(torch.nn.Module):
    """w ReLU(W_s z_u + W_d z_v) + w_p ReLU(W_p f_uv), the logit of an event; f_uv are features of the pair of nodes.

    The terms have separate hidden units: early embeddings have large norms and would dominate a joint sum.
    """

    def __init__(self, width: int, pair_width: int = 0) -> None:
        super().__init__()
        self.src = torch.nn.Linear(width, width)
        self.dst = torch.nn.Linear(width, width)
        self.pair = torch.nn.Linear(pair_width, width) if pair_width else None
        self.out = torch.nn.Linear(width, 1)
        self.pair_out = torch.nn.Linear(width, 1, bias=False) if pair_width else None

    def sources(self, z: Tensor) -> Tensor:
        """[n, D] source part of the hidden units."""
        return linear_float32(self.src, z)

    def destinations(self, z: Tensor) -> Tensor:
        """[n, D] destination part of the hidden units."""
        return linear_float32(self.dst, z)

    def scores(self, sources: Tensor, destinations: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[…] logits of both parts [… , D], which broadcast, and features of pairs [… , P]."""
        logits = _dot(torch.relu(sources + destinations), self.out.weight[0]) + self.out.bias
        if self.pair is None or self.pair_out is None:
            return logits
        assert pairs is not None, "this decoder reads features of pairs"
        flat = pairs.to(logits.dtype).reshape(-1, pairs.shape[-1])
        return logits + _dot(torch.relu(linear_float32(self.pair, flat)), self.pair_out.weight[0]).view(logits.shape)


class ClassDecoder(torch.nn.Module):
    """W [z_u, z_v] + b, the logits of an event's classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * width, classes)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """src, dst [n, D] → [n, C]."""
        return linear_float32(self.out, torch.cat([src, dst], 1))


def _dot(rows: Tensor, weight: Tensor) -> Tensor:
    """[…] of rows […, D], without a matrix product.

    Autocast would round its results: distinct scores would become equal, and rounding depends on the position of a row,
    so equal scores would become distinct.
    """
    return (rows * weight).sum(-1)
