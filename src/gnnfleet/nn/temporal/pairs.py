"""Features of a pair of nodes: whether it met before, how often and how long ago.

Interactions repeat, and embeddings of single nodes do not contain the history of a pair. n events, K candidates each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
